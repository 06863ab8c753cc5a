"""Slots of shared memory: each with one owner, whatever is dropped or given back."""

import asyncio
import fcntl
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.transfer_pb2 import Chunk, Frame
from tests.transport.harness import hello, network, soon
from tests.transport.test_meeting import links_of
from transport.shm_ring import NUM_SLOTS, SLOT_BYTES, ShmRing, Slots


def test_both_processes_see_the_same_bytes_and_the_memory_cannot_shrink() -> None:
    ours, fd = ShmRing.create()
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 1)
    theirs = ShmRing.open(fd)
    ours.view(3, 5)[:] = 7
    assert theirs.view(3, 5).tolist() == [7] * 5


def test_memory_that_we_could_not_trust_is_refused() -> None:
    fd = os.memfd_create("small", os.MFD_ALLOW_SEALING)
    with pytest.raises(ValueError, match="a ring of 0 bytes"):
        ShmRing.open(fd)
    fd = os.memfd_create("shrinks", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, NUM_SLOTS * SLOT_BYTES)
    with pytest.raises(ValueError, match="may shrink"):
        ShmRing.open(fd)
    with pytest.raises(OSError):
        fcntl.fcntl(fd, fcntl.F_GETFD)  # closed, too


async def test_a_slot_dropped_unsent_is_free_again() -> None:
    slots = Slots()
    taken = [slots.take() for _ in range(NUM_SLOTS)]
    assert sorted(slot for slot in taken if slot is not None) == list(range(NUM_SLOTS))
    waiting = asyncio.create_task(asyncio.to_thread(slots.take))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    slots.drop(3)
    async with asyncio.timeout(2):
        assert await waiting == 3
    slots.check()


async def test_who_waits_for_a_slot_stops_when_the_link_is_closed() -> None:
    slots = Slots()
    for _ in range(NUM_SLOTS):
        slots.take()
    waiting = asyncio.create_task(asyncio.to_thread(slots.take))
    await asyncio.sleep(0.01)
    slots.close()
    async with asyncio.timeout(2):
        assert await waiting is None


def test_only_the_other_end_gives_a_posted_slot_back() -> None:
    slots = Slots()
    slot = slots.take()
    assert slot is not None and not slots.give_back(slot)
    slots.post(slot)
    assert slots.give_back(slot)
    assert not slots.give_back(slot)
    assert not slots.give_back(99)
    slots.check()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["take", "drop", "post", "back"]), max_size=80))
def test_any_history_keeps_every_slot_with_one_owner(history: list[str]) -> None:
    slots, taken, posted = Slots(), list[int](), list[int]()
    for what in history:
        if what == "take" and len(taken) + len(posted) < NUM_SLOTS:
            slot = slots.take()
            assert slot is not None and slot not in [*taken, *posted]
            taken.append(slot)
        elif what == "drop" and taken:
            slots.drop(taken.pop(0))
        elif what == "post" and taken:
            slots.post(taken[-1])
            posted.append(taken.pop())
        elif what == "back" and posted:
            assert slots.give_back(posted.pop(0))
        slots.check()
        assert len(slots._free) == NUM_SLOTS - len(taken) - len(posted)


async def test_a_payload_is_read_where_it_was_built_and_its_slot_comes_back() -> None:
    async with network("shm") as net:
        near, far, keeper = await links_of(net)
        for seq in range(3 * NUM_SLOTS):

            def fill(room: memoryview, seq: int = seq) -> Frame:
                room[:] = bytes([seq]) * 1000
                return Frame(chunk=Chunk(seq=seq, payload_bytes=1000))

            await near.load(1000, fill)  # type: ignore[attr-defined]
            _, payload = await far.recv()
            assert payload is not None and bytes(payload) == bytes([seq]) * 1000
            del payload
        slots = near._slots  # type: ignore[attr-defined]
        await soon(lambda: len(slots._free) == NUM_SLOTS)
        keeper.leave.set()
        await near.close("done")


async def test_an_oversized_payload_goes_over_the_socket() -> None:
    async with network("shm") as net:
        near, far, keeper = await links_of(net)
        payload = memoryview(os.urandom(SLOT_BYTES + 5))
        chunk = Frame(chunk=Chunk(seq=1, payload_bytes=payload.nbytes))
        sending = asyncio.create_task(near.send(chunk, payload))
        assert (await far.recv())[1] == payload
        await sending
        keeper.leave.set()
        await near.close("done")


async def test_a_slot_that_was_never_lent_ends_the_link() -> None:
    async with network("shm") as net:
        near, far, keeper = await links_of(net)
        far._stream.send(b"\x05\x00", -2)  # type: ignore[attr-defined]
        with pytest.raises(Exception, match="slot 5 was given back"):
            async with asyncio.timeout(5):
                await near.recv()
        keeper.leave.set()
        await near.close("done")
        assert hello().prefill_rank == 0
