"""What a trace is too short to say, in sentences with the numbers.

Capacity is a matter of the long run, and a trace ends. Queues that grow all the time are noticed
only when they cost more than the target allows; a share of the requests wants several that miss;
a cache that never fills never evicts.
"""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean

from kvferry.replay.capacity import Capacity, Found

MAX_HIDDEN = 0.05  # of the rate: how much too high a rate may pass
MIN_ANSWERS = 10  # one after the other in the time that the trace takes
MIN_MISSES = 5  # that the share allows, so that it is not one request that decides


def may_mislead(asked: Capacity, found: Sequence[Found]) -> Iterator[str]:
    """A sentence for each way in which the trace is too short for what was found with it."""
    num_requests = len(asked.trace.arrivals)
    allowed = num_requests * (1 - asked.targets.share)
    if asked.targets.share < 1 and allowed < MIN_MISSES:
        wanted = math.ceil(MIN_MISSES / (1 - asked.targets.share))
        yield (
            f"{num_requests} requests allow {allowed:.3g} to miss at --share"
            f" {asked.targets.share:g}, so that a few decide: use {wanted} at least"
        )
    hidden = [(_hidden(asked, each), each) for each in found if each.rate]
    share, worst = max(hidden, key=lambda each: each[0], default=(0.0, None))
    if worst and share > MAX_HIDDEN:
        yield (
            f"at {worst.rate:.3g}/s the trace lasts {num_requests / worst.rate:.3g} s, in which a"
            f" rate {share:.0%} too high makes nobody wait beyond --ttft"
            f" {asked.targets.ttft_ms / 1000:g}: for {worst.split} use"
            f" {math.ceil(num_requests * share / MAX_HIDDEN)} requests at least"
        )
    answer_s = _answer_s(asked)
    for each in found:
        if each.rate * answer_s * MIN_ANSWERS > num_requests:
            yield (
                f"at {each.rate:.3g}/s the trace lasts {num_requests / each.rate:.3g} s and the"
                f" usual answer {answer_s:.3g} s at least: decode's batch hardly grows to what it"
                f" is in the long run; use {math.ceil(each.rate * answer_s * MIN_ANSWERS)} requests"
                " at least"
            )
            break
    distinct, reused = _tokens(asked)
    smallest = min((each.split.num_prefill for each in found), default=1)
    held = smallest * asked.options.cache_tokens
    if reused and distinct < held:
        yield (
            f"the trace's {distinct:,} distinct tokens never fill {smallest} x"
            f" {asked.options.cache_tokens:,} tokens of cache: nothing is evicted, and more is"
            " reused than in the long run"
        )


def _hidden(asked: Capacity, found: Found) -> float:
    """Of the rate: at so much more, the last request is late by just the target."""
    return asked.targets.ttft_ms / 1000 * found.rate / found.num_requests


def _answer_s(asked: Capacity) -> float:
    """The mean of what answers take of which nothing else is decoded meanwhile."""
    lengths = [max(0, each.output_tokens - 1) for each in asked.trace.arrivals]
    return fmean(lengths) * asked.options.speeds.step_ms(1, 0) / 1000


def _tokens(asked: Capacity) -> tuple[int, int]:
    """Distinct ones in full blocks, and those that an endless cache would reuse."""
    size = asked.trace.block_tokens
    total = sum(len(each.names) for each in asked.trace.arrivals)
    distinct = len({name for each in asked.trace.arrivals for name in each.names})
    return size * distinct, size * (total - distinct)
