"""The real router over simulated workers: what must hold whatever the trace."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.errors import CommandError
from kvferry.replay.options import Fault, Options, parse_fault
from kvferry.replay.outcome import Outcome
from kvferry.replay.rivals import Policy
from kvferry.replay.simulation import replay
from kvferry.replay.trace import Trace, read_trace
from router.hit_rate import Loss
from tests.kvferry.replay.traces import write_conversations

SMALL = Options(num_replicas=4, cache_tokens=240_000, decode_tokens=1_600_000, load=0.8)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    return read_trace(write_conversations(path, sessions=160))


@pytest.fixture(scope="module")
def outcomes(trace: Trace) -> dict[Policy, Outcome]:
    return {policy: replay(trace, replace(SMALL, policy=policy)) for policy in Policy}


def delivered(outcome: Outcome) -> float:
    rate = outcome.hit_rate
    return rate.rate(rate.delivered)


def test_every_request_is_served_and_every_token_accounted_for(
    trace: Trace, outcomes: dict[Policy, Outcome]
) -> None:
    for outcome in outcomes.values():
        assert [each.request for each in outcome.served] == list(range(800))
        for served, arrival in zip(outcome.served, trace.arrivals, strict=True):
            served.hit_rate.check()
            assert served.hit_rate.prompt == arrival.num_tokens
            assert 0 < served.ttft_ms <= served.total_ms


def test_nobody_exceeds_a_cache_without_end(outcomes: dict[Policy, Outcome]) -> None:
    endless = outcomes[Policy.INFINITE_CACHE]
    assert delivered(endless) == pytest.approx(
        endless.hit_rate.rate(endless.hit_rate.oracle), abs=0.001
    )
    assert all(delivered(each) <= delivered(endless) for each in outcomes.values())


def test_ours_reuses_what_a_shorter_queue_would_throw_away(outcomes: dict[Policy, Outcome]) -> None:
    ours = outcomes[Policy.OURS]
    for rival in (Policy.LEAST_LOADED, Policy.ROUND_ROBIN, Policy.RANDOM):
        assert delivered(ours) > 1.5 * delivered(outcomes[rival])
        assert ours.ttft_ms(0.5) < outcomes[rival].ttft_ms(0.5)
    assert ours.imbalance < 1.2


def test_most_cached_sends_everything_to_one_replica(outcomes: dict[Policy, Outcome]) -> None:
    """All prompts share their first block."""
    piled = outcomes[Policy.MOST_CACHED]
    assert piled.imbalance > 2
    assert outcomes[Policy.FIRST_BLOCK].imbalance == pytest.approx(4)
    assert piled.ttft_ms() > 2 * outcomes[Policy.OURS].ttft_ms()


def test_predictions_come_true(outcomes: dict[Policy, Outcome]) -> None:
    ours = outcomes[Policy.OURS]
    assert ours.prediction_error_ms < 0.2 * ours.ttft_ms()


@pytest.mark.parametrize("policy", [Policy.OURS, Policy.RANDOM])
def test_one_seed_gives_one_decision_log(trace: Trace, policy: Policy) -> None:
    options = replace(SMALL, policy=policy, faults=(Fault(10, 1, 4.0),), index_lag_s=0.3)
    one, two = replay(trace, options), replay(trace, options)
    assert one.decisions == two.decisions and one.digest == two.digest
    if policy is Policy.RANDOM:
        assert replay(trace, replace(options, seed=1)).digest != one.digest


def test_a_decision_log_does_not_depend_on_the_process(tmp_path: Path) -> None:
    path = write_conversations(tmp_path / "t.jsonl", sessions=8)
    logs = []
    for hash_seed in ("1", "2"):
        log = tmp_path / f"log-{hash_seed}"
        command = [sys.executable, "-m", "kvferry", "replay", str(path), "--policy", "ours"]
        command += ["--replicas", "3", "--load", "0.7", "--decisions", str(log)]
        command += ["--out", str(tmp_path / f"{hash_seed}.json")]
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        subprocess.run(command, check=True, env=environment, capture_output=True)
        logs.append(log.read_bytes())
        found = json.loads((tmp_path / f"{hash_seed}.json").read_text())
        assert found["replays"][0]["requests"] == 40
        assert (tmp_path / f"{hash_seed}.png").read_bytes().startswith(b"\x89PNG")
    assert logs[0] == logs[1] and logs[0].count(b"\n") == 40


def test_a_replica_that_dies_costs_retries_and_no_request(trace: Trace) -> None:
    outcome = replay(trace, replace(SMALL, faults=(Fault(30, 0, 5.0), Fault(60, 1, None))))
    assert len(outcome.served) == 800
    assert max(each.attempts for each in outcome.served) > 1
    assert outcome.hit_rate.lost[Loss.EPOCH] > 0
    late = [each for each in outcome.decisions if each.at_s > 70]
    assert late and not any(each.candidate.startswith("prefill-1") for each in late)


def test_a_slow_index_loses_tokens_to_lag_and_to_staleness(trace: Trace) -> None:
    prompt, slow = (replay(trace, replace(SMALL, index_lag_s=lag)) for lag in (0.0, 2.0))
    assert delivered(slow) < delivered(prompt)

    def late(outcome: Outcome) -> int:
        return sum(outcome.hit_rate.lost.get(loss, 0) for loss in (Loss.LAG, Loss.STALE))

    assert late(slow) > late(prompt)


def test_an_impossible_size_is_refused_with_the_figures(trace: Trace) -> None:
    with pytest.raises(CommandError, match="a cache of 1000 tokens cannot hold the longest"):
        replay(trace, replace(SMALL, cache_tokens=1000))
    with pytest.raises(CommandError, match="decode's 1000 tokens cannot hold the longest"):
        replay(trace, replace(SMALL, decode_tokens=1000))


def test_faults_are_written_as_they_are_read() -> None:
    assert parse_fault("kill:3@60") == Fault(60.0, 3, None)
    assert parse_fault("restart:0@60+5.5") == Fault(60.0, 0, 5.5)
    for text in ("kill:3", "kill:3@60+5", "restart:0@60", "nap:1@2", "kill:x@1"):
        with pytest.raises(CommandError, match="is no fault"):
            parse_fault(text)
