from engine.clock import ManualClock
from protos import inference_pb2 as pb
from router.sessions import Sessions
from tests.router.fakes import FakeCluster, request


def test_a_session_is_its_tenants_own_and_is_forgotten_in_time() -> None:
    clock = ManualClock()
    sessions = Sessions(clock, keep_s=10, max_sessions=2)
    sessions.note(b"a", "s", "p0", "d0")
    sessions.note(b"a", "", "p0", "d0")
    home = sessions.home(b"a", "s")
    assert home is not None and (home.prefill, home.decode) == ("p0", "d0")
    assert sessions.home(b"b", "s") is None and sessions.home(b"a", "") is None
    clock.advance(11)
    assert sessions.home(b"a", "s") is None
    for name in ("t", "s", "u"):
        sessions.note(b"a", name, "p0", "d0")
    assert len(sessions) == 2 and sessions.home(b"a", "t") is None


async def test_requests_of_a_session_go_where_it_went(cluster: FakeCluster) -> None:
    for name in ("prefill-0", "prefill-1", "prefill-2", "decode-0"):
        await cluster.add(name)
    stub = await cluster.grpc_stub()
    went = set()
    for number in range(5):
        asked = request(token_ids=[number, *range(40)], pins=pb.Pins(), max_tokens=1)
        asked.session = "a-chat"
        events = [each async for each in stub.Generate(asked)]
        went.add(events[-1].usage.journey.prefill)
    assert len(went) == 1
