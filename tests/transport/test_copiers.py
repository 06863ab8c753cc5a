"""Steps that copying threads go through, with a crew of C and without one."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from functools import partial

import numpy as np
import pytest

from kernels import crew
from kernels.crew import Steps
from kvcache.head_map import HeadInterval
from kvcache.kv_store import KvStore
from tests.transport.broken import carry_whole
from tests.transport.harness import POOL, SPEC, cluster, filled_store, network, soon
from transport.copiers import Copiers

HEADS = list(range(3))


@pytest.fixture(params=["a crew", "no crew"])
async def copiers(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Copiers]:
    if request.param == "no crew":
        monkeypatch.setattr(crew, "load", lambda: None)
    made = Copiers(2, "test-copy")
    yield made
    made.stop()


@pytest.fixture
def store() -> KvStore:
    return filled_store(SPEC, HeadInterval(0, 3), 8, seed=5)


async def test_steps_of_c_and_of_python_come_to_their_result(
    copiers: Copiers, store: KvStore
) -> None:
    where: list[threading.Thread] = []

    def steps() -> Steps[tuple[list[int], int]]:
        digests = yield from store.digesting(range(2), [1, 4], HEADS)
        _, five = yield [lambda: where.append(threading.current_thread()), lambda: 5]
        return digests.tolist(), five

    want = [store.digest_cells(layer, [1, 4], HEADS) for layer in range(2)]
    store.kept.forget_all()
    digests, five = await copiers.go_through(steps())
    assert (digests, five) == (np.concatenate(want).tolist(), 5)
    assert where != [threading.main_thread()]


async def test_what_fails_in_the_steps_or_their_calls_is_told(copiers: Copiers) -> None:
    def fails_at_once() -> Steps[None]:
        raise ValueError("before any call")
        yield []

    def fails_in_a_call() -> Steps[None]:
        yield [partial(int, "x"), partial(int, "1")]

    def recovers() -> Steps[int]:
        with contextlib.suppress(ValueError):
            yield [partial(int, "x")]
        (one,) = yield [partial(int, "1")]
        return int(one)

    for steps, message in ((fails_at_once(), "before any call"), (fails_in_a_call(), "'x'")):
        with pytest.raises(ValueError, match=message):
            await copiers.go_through(steps)
    assert await copiers.go_through(recovers()) == 1


async def test_steps_whose_waiter_has_left_are_gone_through_all_the_same(copiers: Copiers) -> None:
    may, ended = threading.Event(), list[int]()

    def steps() -> Steps[None]:
        yield [partial(may.wait, 10)]
        yield [partial(int, "2")]
        ended.append(1)

    going = copiers.go_through(steps())
    await asyncio.sleep(0.01)
    going.cancel()
    may.set()
    await soon(lambda: bool(ended))


async def test_steps_begin_when_a_thread_is_about_to_be_free(copiers: Copiers) -> None:
    """Those of a transfer that is given up while others are gone through are never begun."""
    may, begun = threading.Event(), list[int]()

    def steps(number: int) -> Steps[None]:
        begun.append(number)
        yield [partial(may.wait, 10)]

    going = [copiers.go_through(steps(number)) for number in range(10)]
    await asyncio.sleep(0.05)
    assert 2 <= len(begun) <= 4
    may.set()
    await asyncio.gather(*going)
    assert begun == list(range(10))


async def test_stopping_ends_all_steps_first(copiers: Copiers, store: KvStore) -> None:
    ended = list[int]()

    def steps(number: int) -> Steps[None]:
        yield from store.digesting(range(2), [number % 8], HEADS)
        yield [partial(int, "1")]
        yield from store.digesting(range(2), [(number + 1) % 8], HEADS)
        ended.append(number)

    going = [copiers.go_through(steps(number)) for number in range(20)]
    copiers.stop()
    await asyncio.gather(*going)
    assert sorted(ended) == list(range(20))


@pytest.mark.parametrize("wire", ["loopback", POOL])
async def test_transfers_are_whole_without_a_crew(
    wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "load", lambda: None)
    async with network(wire) as net, cluster(net, 2, 3) as group:
        await carry_whole(group)
