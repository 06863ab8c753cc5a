"""The faulty wire itself: what a spec says, that a seed repeats itself, and each kind of fault."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from engine.clock import ManualClock, MonotonicClock
from protos.transfer_pb2 import Chunk, ChunkAck, Commit, Credit, Frame, Hello, ShipmentKey, Welcome
from tests.transport.broken import IMPATIENT, NUM_TOKENS, SOURCE, TARGET, failures
from tests.transport.harness import cluster, network, soon
from transport.fault_wire import FaultWire
from transport.faults import Faults, FaultSpec, Kind, Rule
from transport.link import Connector, Link, LinkClosed

MENDABLE = (
    "drop=0.02 duplicate=0.05 reorder=0.05 delay=0.02 stall=0.005 "
    "truncate=0.05 flip=0.05 swap=0.05 stale=0.05 foreign=0.05"
)


def chunk_frame(seq: int, transfer_id: bytes = b"a") -> tuple[Frame, memoryview]:
    """A chunk of 4 cells of 8 bytes, no two alike."""
    rng = np.random.default_rng([seq, *transfer_id])
    chunk = Chunk(seq=seq, num_blocks=2, payload_bytes=32, digests=rng.bytes(32))
    return Frame(key=ShipmentKey(transfer_id=transfer_id), chunk=chunk), memoryview(rng.bytes(32))


class Taken:
    """A link that keeps what is sent, and never hears anything."""

    def __init__(self) -> None:
        self.hello, self.welcome = Hello(), Welcome()
        self.frames: list[Frame] = []
        self.closed = ""

    async def connect(self, address: str, hello: Hello) -> Link:
        return self

    async def send(self, frame: Frame, payload: memoryview | None = None) -> None:
        self.frames.append(frame)

    async def recv(self) -> tuple[Frame, memoryview | None]:
        await asyncio.sleep(3600)
        raise AssertionError

    async def close(self, reason: str) -> None:
        self.closed = reason

    @property
    def seqs(self) -> list[int]:
        return [frame.chunk.seq for frame in self.frames]


async def sent_over(*words: str, count: int = 8) -> tuple[Taken, Faults]:
    """What arrives of `count` chunks."""
    taken, faults, clock = Taken(), Faults.of(*words), MonotonicClock()
    link = await FaultWire(taken, faults, clock, wait_s=0.01).connect("", Hello())
    for seq in range(count):
        await link.send(*chunk_frame(seq))
    return taken, faults


def test_a_spec_says_which_frames_are_hit_and_how_often() -> None:
    spec = FaultSpec.parse("seed=7 flip=0.25 drop:commit=1 refuse@3")
    assert spec == FaultSpec(
        7,
        (Rule(Kind.FLIP, rate=0.25), Rule(Kind.DROP, "commit", 1.0), Rule(Kind.REFUSE, nth=3)),
    )
    assert FaultSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("melt=0.1", "KIND one of cut, delay, drop"),
        ("flip", "want KIND=RATE or KIND@NTH"),
        ("drop:nothing=1", "no frame 'nothing'; there are abort, cells_again, chunk"),
        ("drop=1.5", "a rate is between 0 and 1, not 1.5"),
        ("cut@0", "counted from 1"),
    ],
)
def test_a_word_that_means_nothing_is_named(word: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"'{word}'.*{reason}"):
        FaultSpec.parse(f"seed=1 {word}")


def test_a_seed_repeats_itself_and_another_does_not() -> None:
    def history(seed: int) -> list[str]:
        faults = Faults.of(f"seed={seed}", "drop=0.2 flip=0.2 swap=0.2 stale=0.2 reorder=0.1")
        for seq in range(200):
            faults.draw(True, *chunk_frame(seq))
        return [str(each) for each in faults.log]

    assert history(3) == history(3) != history(4)


@pytest.mark.parametrize("kind", ["flip", "swap", "stale", "foreign", "truncate"])
def test_each_damage_changes_what_it_says_and_nothing_else(kind: str) -> None:
    faults = Faults.of("seed=5", f"{kind}=1")
    for seq in range(300):
        frame, payload = chunk_frame(seq, transfer_id=b"ab"[seq % 2 : seq % 2 + 1])
        before, digests, num_before = bytes(payload), frame.chunk.digests, faults.num_damaged_cells
        hit, damaged, changed = faults.draw(True, frame, payload)
        assert changed is not None
        assert bytes(payload) == before and frame.chunk.digests == digests
        after = bytes(changed)
        cells = range(0, 32, 8)
        wrong = [after[i : i + 8] != before[i : i + 8] for i in cells]
        wrong = [
            bad or damaged.chunk.digests[i : i + 8] != digests[i : i + 8]
            for bad, i in zip(wrong, cells, strict=True)
        ]
        assert sum(wrong) == faults.num_damaged_cells - num_before
        assert (hit is not None) == any(wrong)
        if kind in ("swap", "flip"):
            assert len(after) == len(before)
    assert faults.count(Kind(kind)) >= 298  # of the first there is no earlier one
    assert len(faults.log) == faults.count(Kind(kind))


async def test_frames_are_dropped_repeated_and_held_back() -> None:
    assert (await sent_over("drop@3"))[0].seqs == [0, 1, 3, 4, 5, 6, 7]
    assert (await sent_over("duplicate@3"))[0].seqs == [0, 1, 2, 2, 3, 4, 5, 6, 7]
    held = (await sent_over("reorder@3"))[0].seqs
    assert sorted(held) == list(range(8))
    assert held.index(2) in (3, 4, 5)
    assert (await sent_over("half_close@3"))[0].seqs == [0, 1]


async def test_a_refused_send_fails_and_the_link_lives_and_a_cut_ends_it() -> None:
    taken, clock = Taken(), MonotonicClock()
    link = await FaultWire(taken, Faults.of("refuse@2 cut@2"), clock).connect("", Hello())
    await link.send(*chunk_frame(0))
    with pytest.raises(OSError, match="refused"):
        await link.send(*chunk_frame(1))
    assert taken.frames
    with pytest.raises(LinkClosed, match="cut"):
        await link.send(*chunk_frame(2))
    assert taken.closed == "the wire was cut"


async def test_a_stall_holds_both_directions_and_keeps_the_order() -> None:
    taken, clock = Taken(), ManualClock()
    link = await FaultWire(taken, Faults.of("stall@2"), clock, wait_s=5).connect("", Hello())
    tasks = [asyncio.create_task(link.send(*chunk_frame(seq))) for seq in range(5)]
    await clock.run(4.9)
    assert taken.seqs == [0]
    await clock.run(0.2)
    await asyncio.gather(*tasks)
    assert taken.seqs == [0, 1, 2, 3, 4]


def test_a_rule_for_one_frame_leaves_the_others_alone() -> None:
    faults = Faults.of("drop:commit=1")
    for frame in (Frame(credit=Credit()), Frame(chunk_ack=ChunkAck()), Frame(commit=Commit())):
        faults.draw(False, frame, None)
    assert [each.what.split()[0] for each in faults.log] == ["commit"]


def test_a_failure_tells_the_seed_and_what_was_injected() -> None:
    with pytest.raises(AssertionError) as failed, Faults.of("seed=42 drop=1") as faults:
        faults.draw(True, *chunk_frame(9))
        raise AssertionError("wrong")
    (note,) = failed.value.__notes__
    assert "seed=42 drop=1" in note
    assert "frame 1 down: drop chunk 9 of 61/0: layer 0, blocks 0-1" in note


def broken(faults: Faults) -> Callable[[Connector], Connector]:
    return lambda inner: FaultWire(inner, faults, MonotonicClock())


@pytest.mark.parametrize("wire", ["loopback", "tcp", "shm", "grpc"])
async def test_any_mix_of_faults_that_can_be_made_good_ends_in_equal_bytes(wire: str) -> None:
    config = replace(IMPATIENT, lease_s=1.2, max_link_asks=8)
    with Faults.of("seed=1", MENDABLE) as faults:
        async with (
            network(wire) as net,
            cluster(net, 2, 1, config=config, wrap=broken(faults)) as group,
        ):
            for _ in range(12):
                await group.carry(NUM_TOKENS, SOURCE, TARGET)
                group.check_blocks(NUM_TOKENS, SOURCE, TARGET)
            assert faults.count() > 50
            await soon(lambda: all(s.open_shipments == 0 for s in group.prefill.shippers))


@pytest.mark.parametrize("wire", ["loopback", "tcp", "shm", "grpc"])
@pytest.mark.parametrize("word", ["refuse:chunk@2", "refuse:open@1", "cut:chunk@3", "cut:credit@1"])
async def test_a_wire_that_fails_fails_both_ends_at_once_and_works_again(
    wire: str, word: str
) -> None:
    with Faults.of(word) as faults:
        async with network(wire) as net, cluster(net, wrap=broken(faults)) as group:
            key = group.key()
            expected, shipped = group.expect(key, NUM_TOKENS, TARGET), group.ship(key, NUM_TOKENS)
            group.seal_all(key, NUM_TOKENS, SOURCE)
            async with asyncio.timeout(1 if word != "refuse:open@1" else 10):
                await failures(*shipped)
            if word != "refuse:open@1":  # else decode has never heard of it
                async with asyncio.timeout(1):
                    await failures(*expected)
            for receiver in group.decode.receivers:
                await receiver.abort(key, "given up")
            await asyncio.gather(*expected, return_exceptions=True)
            await group.carry(NUM_TOKENS, SOURCE, TARGET)
            group.check_blocks(NUM_TOKENS, SOURCE, TARGET)


@pytest.mark.parametrize("word", ["half_close:chunk@2", "half_close:chunk_ack@1"])
async def test_a_half_closed_link_frees_both_ends_when_the_lease_ends(word: str) -> None:
    config = replace(IMPATIENT, lease_s=0.6)
    with Faults.of(word) as faults:
        async with (
            network("loopback") as net,
            cluster(net, config=config, wrap=broken(faults)) as (group),
        ):
            key = group.key()
            expected, shipped = group.expect(key, NUM_TOKENS, TARGET), group.ship(key, NUM_TOKENS)
            group.seal_all(key, NUM_TOKENS, SOURCE)
            async with asyncio.timeout(config.lease_s + 1):
                await asyncio.wait([*shipped], timeout=config.lease_s + 1)
                await failures(*shipped)
                if word == "half_close:chunk@2":  # else decode has heard all and is whole
                    await failures(*expected)
            for receiver in group.decode.receivers:
                await receiver.abort(key, "given up")
            await asyncio.gather(*expected, return_exceptions=True)
            await soon(lambda: group.prefill.shippers[0].open_shipments == 0)
