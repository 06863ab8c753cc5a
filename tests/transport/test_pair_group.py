import asyncio
import contextlib
import os
import re
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest

from transport.link import LinkClosed
from transport.pair_group import DECODE, PREFILL, PairGroup, PairStore, Rendezvous

ROOT = Path(__file__).parents[2]
HERE = "127.0.0.1"


async def both(store: PairStore, name: str) -> tuple[PairGroup, PairGroup]:
    meet = Rendezvous(store.host, store.port, name)
    prefill, decode = await asyncio.gather(
        PairGroup.join(PREFILL, meet, HERE, "gloo", 5),
        PairGroup.join(DECODE, meet, HERE, "gloo", 5),
    )
    return prefill, decode


def send(group: PairGroup, payload: bytes) -> "asyncio.Future[None]":
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def left(error: Exception | None) -> None:
        settle = partial(done.set_exception, error) if error else partial(done.set_result, None)
        loop.call_soon_threadsafe(settle)

    group.send(memoryview(payload), left)
    return done


def recv(group: PairGroup, num_bytes: int) -> "asyncio.Future[memoryview]":
    return group.recv(memoryview(bytearray(num_bytes)))


def listening() -> set[str]:
    """The addresses on which this process listens, as the kernel writes them."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them is closed by now
            link = os.readlink(f"/proc/self/fd/{fd}")
            inodes |= set(re.findall(r"socket:\[(\d+)\]", link))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found


async def test_messages_of_any_size_arrive_in_order() -> None:
    store = PairStore(HERE, 5)
    prefill, decode = await both(store, "sizes")
    payloads = [os.urandom(size) for size in (1, 5_000_000, 3, 70_000)]
    coming = [recv(decode, len(payload)) for payload in payloads]
    leaving = [send(prefill, payload) for payload in payloads]
    assert [bytes(await each) for each in coming] == payloads
    await asyncio.gather(*leaving)
    prefill.close()
    decode.close()


async def test_nothing_listens_beyond_the_address_it_was_told() -> None:
    before = listening() - {"0100007F"}
    store = PairStore(HERE, 5)
    prefill, decode = await both(store, "listeners")
    assert listening() - before == {"0100007F"}
    prefill.close()
    decode.close()


async def test_a_member_that_never_comes_is_an_error_in_time() -> None:
    store = PairStore(HERE, 5)
    with pytest.raises(RuntimeError):
        await PairGroup.join(PREFILL, Rendezvous(HERE, store.port, "alone"), HERE, "gloo", 0.5)


async def test_a_closed_pair_keeps_nobody_waiting() -> None:
    store = PairStore(HERE, 5)
    prefill, decode = await both(store, "closed")
    first = recv(decode, 4)
    await send(prefill, b"ping")
    assert bytes(await first) == b"ping"
    decode.close()  # with nothing under way
    prefill.close()
    prefill, decode = await both(store, "closed in the middle")
    waiting = [recv(decode, 4) for _ in range(3)]
    await asyncio.sleep(0.05)
    decode.close()
    prefill.close()
    async with asyncio.timeout(10):
        ends = await asyncio.gather(*waiting, return_exceptions=True)
    kinds = (RuntimeError, LinkClosed, asyncio.CancelledError)
    assert all(isinstance(end, kinds) for end in ends), ends
    with pytest.raises(LinkClosed):
        recv(decode, 4)


async def test_a_killed_peer_fails_its_own_pair_at_once_and_no_other() -> None:
    store = PairStore(HERE, 5)
    other_prefill, other_decode = await both(store, "other")
    code = f"""
        import asyncio
        from transport.pair_group import DECODE, PairGroup, Rendezvous

        async def main():
            meet = Rendezvous({HERE!r}, {store.port}, "doomed")
            group = await PairGroup.join(DECODE, meet, {HERE!r}, "gloo", 90)
            print("joined", flush=True)
            await group.recv(memoryview(bytearray(4)))
            print("received", flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with (
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.kill)
        assert process.stdout is not None
        meet = Rendezvous(HERE, store.port, "doomed")
        doomed = await PairGroup.join(PREFILL, meet, HERE, "gloo", 90)
        await send(doomed, b"ping")
        for expected in ("joined\n", "received\n"):
            assert await asyncio.to_thread(process.stdout.readline) == expected
        sending = send(doomed, bytes(8 << 20))  # nobody takes it
        await asyncio.sleep(0.05)
        process.kill()
        with pytest.raises(RuntimeError):
            async with asyncio.timeout(10):  # far less than the 90 s that a call may take
                await sending
    received = recv(other_decode, 4)
    await send(other_prefill, b"pong")
    assert bytes(await received) == b"pong"
    for group in (doomed, other_prefill, other_decode):
        group.close()


@pytest.mark.parametrize("text", ["", "host:1", "host/name", "host:x/name", ":1/name", "host:1/"])
def test_a_rendezvous_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not host:port/name"):
        Rendezvous.parse(text)


def test_a_rendezvous_reads_back_as_it_was_written() -> None:
    meet = Rendezvous("127.0.0.1", 4711, "p1.0.3")
    assert Rendezvous.parse(str(meet)) == meet
