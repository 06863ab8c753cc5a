"""`kvferry stats`: what prompts could have reused, what they did reuse, and where it was lost; and
how well the router predicts what it decides by.
"""

import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from urllib.error import URLError

from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.console import Console
from rich.table import Table

from kvferry.errors import NoCluster
from router.hit_rate import FETCHED, KINDS, HitRate, Loss

ASK_TIMEOUT_S = 3.0


def stats(http_url: str, console: Console) -> None:
    """Ask the router whose HTTP door this is. Raises NoCluster."""
    text = read_metrics(http_url)
    console.print(hit_rate_table(hit_rate_of(text)))
    console.print(prediction_table(predictions_of(text)))
    console.print(regret_line(text), highlight=False)


def read_metrics(http_url: str) -> str:
    """What the router whose HTTP door this is counts. Raises NoCluster."""
    try:
        with urllib.request.urlopen(
            f"{http_url.rstrip('/')}/metrics", timeout=ASK_TIMEOUT_S
        ) as answer:
            text: str = answer.read().decode()
    except (URLError, OSError, ValueError) as error:
        raise NoCluster(
            f"{http_url} gives no metrics ({_why(error)}): it must be a router's HTTP door, "
            "such as http://127.0.0.1:8000"
        ) from None
    return text


def _why(error: Exception) -> str:
    reason = error.reason if isinstance(error, URLError) else error
    return str(getattr(reason, "strerror", None) or reason)


@dataclass(frozen=True, slots=True)
class Predictions:
    """Of one kind, for one worker. `ratio` is the median of what happened over the predicted."""

    worker: str
    what: str
    count: int
    ratio: float
    error_ms: float  # the mean distance


def hit_rate_of(text: str) -> HitRate:
    """What a router's /metrics say of all its prompts so far."""
    tokens: dict[str, int] = {}
    lost: dict[Loss, int] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "kvferry_prompt_tokens_total":
                tokens[sample.labels["kind"]] = int(sample.value)
            elif sample.name == "kvferry_lost_prompt_tokens_total":
                lost[Loss(sample.labels["reason"])] = int(sample.value)
    counts = {kind: tokens.get(kind, 0) for kind in (*KINDS, FETCHED)}
    return HitRate(**counts, lost=lost)


def hit_rate_table(rate: HitRate) -> Table:
    """The shares add up: what was delivered, and what was lost for each reason."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("prompt tokens", "", "of all"):
        table.add_column(heading, justify="left" if heading == "prompt tokens" else "right")
    for kind, count in zip(KINDS, rate.chain(), strict=True):
        table.add_row(kind, f"{count:,}", f"{rate.rate(count):.1%}")
    table.add_section()
    if rate.fetched:
        table.add_row(FETCHED, f"{rate.fetched:,}", f"{rate.rate(rate.fetched):.1%}")
    for loss, count in rate.lost.items():
        table.add_row(f"lost: {loss.value}", f"{count:,}", f"{rate.rate(count):.1%}")
    return table


def predictions_of(text: str) -> list[Predictions]:
    """By worker, then by kind."""
    buckets: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    errors: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name, labels = sample.name, sample.labels
            key = (labels.get("worker", ""), labels.get("what", ""))
            if name == "kvferry_prediction_ratio_bucket":
                buckets[key].append((float(labels["le"]), sample.value))
            elif name.startswith("kvferry_prediction_error_seconds_"):
                errors[key][name.rpartition("_")[2]] = sample.value
    return [
        Predictions(
            *key,
            count=int(error["count"]),
            ratio=_median(buckets[key]),
            error_ms=1000 * error["sum"] / max(1.0, error["count"]),
        )
        for key, error in sorted(errors.items())
    ]


def prediction_table(predictions: Sequence[Predictions]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("worker")
    table.add_column("time to")
    for heading in ("predictions", "happened / predicted", "off by"):
        table.add_column(heading, justify="right")
    for each in predictions:
        error = f"{each.error_ms:.1f} ms"
        table.add_row(each.worker, each.what, f"{each.count:,}", f"{each.ratio:.2f}", error)
    return table


def regret_line(text: str) -> str:
    """How much sooner first tokens would have come from the best alternatives."""
    values = {
        (sample.name, sample.labels.get("le", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("kvferry_regret_seconds_")
    }
    count = values.get(("kvferry_regret_seconds_count", ""), 0.0)
    if not count:
        return "regret: no request had an alternative yet"
    mean_ms = 1000 * values["kvferry_regret_seconds_sum", ""] / count
    best = values["kvferry_regret_seconds_bucket", "0.0"] / count
    return f"regret: {mean_ms:.1f} ms in the mean of {count:,.0f}, none in {best:.0%} of them"


def _median(buckets: Sequence[tuple[float, float]]) -> float:
    """From counts up to each bound, the last of which has no end; linear within a bucket."""
    ordered = [(0.0, 0.0), *sorted(buckets)]
    half = ordered[-1][1] / 2
    for (low, before), (high, upto) in pairwise(ordered):
        if upto >= half and upto > before:
            share = (half - before) / (upto - before)
            return low if high == float("inf") else low + share * (high - low)
    return 0.0
