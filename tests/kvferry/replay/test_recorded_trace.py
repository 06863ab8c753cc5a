"""The first minutes of a recorded workload; `make bench-replay` measures all of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.replay.options import Options
from kvferry.replay.rivals import Policy
from kvferry.replay.simulation import replay
from kvferry.replay.trace import read_trace

TRACE = Path(__file__).parents[4] / "shared/traces/mooncake/conversation_trace.jsonl"


@pytest.mark.skipif(not TRACE.exists(), reason=f"{TRACE} is not here: it is data of others")
def test_conversations_find_their_blocks_and_no_replica_is_piled_on() -> None:
    trace = read_trace(TRACE).first(1500)
    ours, least, random, endless = (
        replay(trace, replace(Options(load=0.8), policy=policy))
        for policy in (Policy.OURS, Policy.LEAST_LOADED, Policy.RANDOM, Policy.INFINITE_CACHE)
    )
    hit, most = (rate.rate(rate.delivered) for rate in (ours.hit_rate, endless.hit_rate))
    assert most == pytest.approx(0.2696, abs=0.0001)
    assert 0.21 < hit < most
    # Over so few minutes chance alone makes one of eight busier: 1.09 where they take turns. The
    # bar of 1.10 is for the whole trace.
    assert ours.imbalance < (1 + random.imbalance) / 2
    assert ours.ttft_ms(0.5) < least.ttft_ms(0.5) and ours.ttft_ms(0.9) < least.ttft_ms(0.9)
