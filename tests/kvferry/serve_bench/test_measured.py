"""What a replay is told of a live cluster's speed."""

import pytest

from kvferry.serve_bench.doors import Usage
from kvferry.serve_bench.load import OK, Reply
from kvferry.serve_bench.measured import prompt_line
from kvferry.serve_bench.results import Results
from protos.inference_pb2 import Journey


def results(count: int, queued_ms: float) -> Results:
    """8 ms and 0.05 ms a token, but every fifth prompt waited."""
    replies = []
    for at in range(count):
        computed = 16 * (1 + at % 13)
        reply = Reply(at, "", 0.0, computed, OK, late_ms=3.0)
        reply.ttft_ms = 3.0 + 8.0 + 0.05 * computed + (queued_ms if at % 5 == 0 else 0.0)
        reply.usage = Usage(computed, 0, Journey(prefill="p0", computed_tokens=computed))
        replies.append(reply)
    return Results(replies, count, 1.0, None)


def test_a_prompts_line_is_found_though_some_have_waited() -> None:
    base_ms, token_ms = prompt_line(results(100, queued_ms=40.0)) or (0.0, 0.0)
    assert base_ms == pytest.approx(8.0, abs=0.5)
    assert token_ms == pytest.approx(0.05, abs=0.003)


def test_too_few_prompts_make_no_line() -> None:
    assert prompt_line(results(10, queued_ms=0.0)) is None
