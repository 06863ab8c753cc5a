"""The figures of a router, as a person reads them."""

import io

import pytest
from rich.console import Console

from kvferry.errors import NoCluster
from kvferry.stats import (
    Predictions,
    hit_rate_of,
    hit_rate_table,
    predictions_of,
    read_metrics,
    regret_line,
)
from router.hit_rate import HitRate, Loss

METRICS = """\
# TYPE kvferry_prompt_tokens_total counter
kvferry_prompt_tokens_total{kind="prompt"} 1000.0
kvferry_prompt_tokens_total{kind="oracle"} 400.0
kvferry_prompt_tokens_total{kind="available"} 300.0
kvferry_prompt_tokens_total{kind="captured"} 250.0
kvferry_prompt_tokens_total{kind="promised"} 250.0
kvferry_prompt_tokens_total{kind="delivered"} 250.0
# TYPE kvferry_lost_prompt_tokens_total counter
kvferry_lost_prompt_tokens_total{reason="never seen"} 600.0
kvferry_lost_prompt_tokens_total{reason="evicted"} 100.0
kvferry_lost_prompt_tokens_total{reason="load"} 50.0
"""


def test_the_metrics_add_up_and_are_shown_with_their_shares() -> None:
    rate = hit_rate_of(METRICS)
    rate.check()
    assert rate.lost == {Loss.NEW: 600, Loss.EVICTED: 100, Loss.LOAD: 50}
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(hit_rate_table(rate))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["delivered", "250", "25.0%"] in lines
    assert ["lost:", "load", "50", "5.0%"] in lines


def test_a_router_that_has_served_nothing_has_no_rate() -> None:
    rate = hit_rate_of("")
    assert rate == HitRate() and rate.rate(rate.delivered) == 0.0


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:1", "Connection refused"),
        ("127.0.0.1:8000", "unknown url type: 127.0.0.1"),
        ("router", "unknown url type: 'router/metrics'"),
    ],
)
def test_what_is_no_open_door_is_named_and_so_is_what_would_be(url: str, why: str) -> None:
    with pytest.raises(NoCluster) as failure:
        read_metrics(url)
    assert str(failure.value) == (
        f"{url} gives no metrics ({why}): it must be a router's HTTP door, such as "
        "http://127.0.0.1:8000"
    )


PREDICTIONS = """\
# TYPE kvferry_prediction_ratio histogram
kvferry_prediction_ratio_bucket{what="first token",worker="prefill-0",le="0.5"} 0.0
kvferry_prediction_ratio_bucket{what="first token",worker="prefill-0",le="1.0"} 4.0
kvferry_prediction_ratio_bucket{what="first token",worker="prefill-0",le="1.25"} 12.0
kvferry_prediction_ratio_bucket{what="first token",worker="prefill-0",le="+Inf"} 12.0
kvferry_prediction_ratio_count{what="first token",worker="prefill-0"} 12.0
# TYPE kvferry_prediction_error_seconds summary
kvferry_prediction_error_seconds_count{what="first token",worker="prefill-0"} 12.0
kvferry_prediction_error_seconds_sum{what="first token",worker="prefill-0"} 0.06
# TYPE kvferry_regret_seconds histogram
kvferry_regret_seconds_bucket{le="0.0"} 9.0
kvferry_regret_seconds_bucket{le="+Inf"} 12.0
kvferry_regret_seconds_count 12.0
kvferry_regret_seconds_sum 0.024
"""


def test_predictions_are_shown_as_the_median_ratio_and_the_mean_distance() -> None:
    (found,) = predictions_of(PREDICTIONS)
    assert found == Predictions("prefill-0", "first token", 12, 1.0625, found.error_ms)
    assert found.error_ms == pytest.approx(5.0)
    assert regret_line(PREDICTIONS) == "regret: 2.0 ms in the mean of 12, none in 75% of them"
    assert predictions_of("") == [] and "yet" in regret_line("")
