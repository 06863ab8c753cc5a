"""What the ranks of a decode group leave alone, brought together."""

from dataclasses import replace

from engine.clock import ManualClock
from prefix_index.index import Load
from prefix_index.quarantine import may_fetch
from protos.worker_pb2 import PrefillSource
from transport.quarantine import CALL, Quarantined
from worker.quarantines import GroupQuarantines, reports_of

TCP = Quarantined("p0", 3, "tcp", 5.0, 40.0, "9 of 90")
CALLS = Quarantined("p0", 3, CALL, 1.0, 59.0, "7 of 70")
SHM = Quarantined("p0", 3, "shm", 1.0, 59.0, "8 of 80")


def source(epoch: int = 3, *wires: str) -> PrefillSource:
    return PrefillSource(worker="p0", epoch=epoch, wires=wires)


async def test_what_any_rank_leaves_alone_the_whole_worker_does_until_its_time_is_over() -> None:
    clock = ManualClock()
    group = GroupQuarantines(lambda: [TCP], clock)
    assert group.against(source(3, "shm", "tcp")) == ""
    group.hear(1, reports_of([SHM]))
    await clock.run(10.0)
    assert [(each.wire, each.for_s, each.left_s) for each in group.standing()] == [
        ("tcp", 5.0, 40.0),
        ("shm", 11.0, 49.0),
    ]
    why = group.against(source(3, "shm", "tcp"))
    assert "the wire shm is in quarantine (since 11 s, for 49 s more): 8 of 80" in why
    assert "the wire tcp is in quarantine" in why
    assert group.against(source(3, "shm", "tcp", "grpc")) == ""
    assert group.against(source(4, "shm", "tcp")) == ""
    await clock.run(49.0)
    assert [each.wire for each in group.standing()] == ["tcp"]


def test_a_worker_in_quarantine_is_refused_whatever_its_wires() -> None:
    worker = Quarantined("p0", 3, "", 0.0, 60.0, "9 of 90 over tcp and shm")
    group = GroupQuarantines(lambda: [worker], ManualClock())
    assert group.against(source()).startswith("p0 is in quarantine (since 0 s, for 60 s more)")
    assert group.against(source(3, "gloo")) != ""


def test_a_report_of_load_carries_quarantines_and_may_lack_them() -> None:
    group = GroupQuarantines(lambda: [TCP, SHM], ManualClock())
    load = Load(
        running=0,
        waiting=0,
        queued_tokens=0,
        free_blocks=1,
        total_blocks=2,
        prefill_ms_per_token=0.0,
        decode_step_ms=0.0,
        draining=False,
    )
    older = load.to_json().replace(b',"quarantines":[]', b"")
    assert b"quarantines" not in older
    assert Load.from_json(older) == load
    told = replace(load, quarantines=group.standing())
    assert Load.from_json(told.to_json()) == told


def test_calls_that_a_rank_leaves_alone_are_known_as_such_to_all() -> None:
    standing = GroupQuarantines(lambda: [CALLS], ManualClock()).standing()
    assert not may_fetch(standing, "p0", 3)
    assert may_fetch(standing, "p0", 4)
    assert may_fetch(standing, "p1", 3)
