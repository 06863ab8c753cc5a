"""Open loop, in virtual time: what a cluster that stalls costs is seen by whoever comes then."""

import asyncio
from collections.abc import AsyncGenerator, Iterator

import pytest

from kvferry.replay.targets import Targets
from kvferry.replay.virtual_time import VirtualClock, run_virtual
from kvferry.serve_bench.doors import Piece, Refused, Usage
from kvferry.serve_bench.load import Load
from kvferry.serve_bench.results import Results
from kvferry.serve_bench.workload import Ask


class OneAtATime:
    """A cluster with one worker: `seconds` for each prompt, then 0.01 s for each further token."""

    def __init__(self, seconds: float, fails: dict[int, str] | None = None) -> None:
        self.most_open = self.num_open = 0
        self._seconds = seconds
        self._fails = fails or {}
        self._turn = asyncio.Lock()

    async def stream(self, ask: Ask, timeout_s: float) -> AsyncGenerator[Piece, None]:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            async with self._turn:
                await asyncio.sleep(self._seconds)
                if (code := self._fails.get(ask.number)) is not None:
                    raise Refused(code, "no room")
                yield Piece(1)
                for _ in range(ask.max_tokens - 1):
                    await asyncio.sleep(0.01)
                    yield Piece(1)
            yield Piece(usage=Usage(len(ask.prompt), 4))
        finally:
            self.num_open -= 1

    async def close(self) -> None:
        pass


def asks(count: int, every_s: float, max_tokens: int = 1) -> list[Ask]:
    return [Ask(at, at * every_s, [0] * 10, max_tokens) for at in range(count)]


def run(door: OneAtATime, wanted: list[Ask] | Iterator[Ask], until_s: float = 1e6) -> Load:
    load = Load(door, VirtualClock(), timeout_s=60)

    async def main() -> None:
        try:
            async with asyncio.timeout(until_s):
                await load.run(wanted)
        except TimeoutError:
            pass

    run_virtual(main())
    return load


def test_nobody_waits_for_an_answer_before_it_asks() -> None:
    """Ten a second to a worker that needs a second: the tenth waits for nine, less 0.9 s."""
    door = OneAtATime(1.0)
    load = run(door, asks(10, every_s=0.1))
    assert [round(reply.ttft_ms) for reply in load.replies] == [1000 + 900 * n for n in range(10)]
    assert door.most_open == 10 and [reply.late_ms for reply in load.replies] == [0.0] * 10


def test_a_client_that_is_late_says_so_and_counts_it() -> None:
    """The second request took 0.5 s to make and was due after 0.1 s."""

    def slowly() -> Iterator[Ask]:
        first, second = asks(2, every_s=0.1)
        yield first
        loop = asyncio.get_running_loop()
        loop._jump.now += 0.5  # type: ignore[attr-defined]
        yield second

    load = run(OneAtATime(0.2), slowly())
    assert [round(reply.late_ms) for reply in load.replies] == [0, 400]
    assert round(load.replies[1].ttft_ms) >= 600


def test_times_per_token_are_those_after_the_first() -> None:
    (reply,) = run(OneAtATime(1.0), asks(1, 1.0, max_tokens=5)).replies
    assert (round(reply.ttft_ms), round(reply.tpot_ms, 3)) == (1000, 10.0)
    assert round(reply.worst_pause_ms, 3) == 10.0 and reply.num_tokens == 5


def test_failures_are_counted_by_their_code_and_leave_the_times_alone() -> None:
    door = OneAtATime(0.1, {1: "RESOURCE_EXHAUSTED", 3: "UNAVAILABLE", 4: "UNAVAILABLE"})
    load = run(door, asks(6, every_s=1.0))
    results = Results(load.replies, 6, 6.0, None, Targets(100.5, 1.0))
    assert results.in_time == 0.5
    assert results.failed == {"RESOURCE_EXHAUSTED": 1, "UNAVAILABLE": 2}
    assert [round(each) for each in results.figures("live").ttft_ms] == [100, 100, 100]
    assert (results.prompt_tokens, results.cached_tokens) == (30, 12)
    assert results.summary()["hit_rate"] == pytest.approx(0.4)


def test_a_run_that_is_stopped_knows_who_was_not_served() -> None:
    door = OneAtATime(1.0)
    load = run(door, asks(100, every_s=0.5), until_s=2.2)
    codes = [reply.code for reply in load.replies]
    assert codes == ["OK", "OK", "STOPPED", "STOPPED", "STOPPED"]
    assert door.num_open == 0, "every call was closed"


def test_an_answer_that_is_too_short_is_a_failure() -> None:
    class Stingy(OneAtATime):
        async def stream(self, ask: Ask, timeout_s: float) -> AsyncGenerator[Piece, None]:
            yield Piece(ask.max_tokens - 1)

    (reply,) = run(Stingy(1.0), asks(1, 1.0, max_tokens=3)).replies
    assert reply.code == "SHORT_ANSWER"
