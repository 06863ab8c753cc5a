"""`kvferry stats`: what prompts could have reused, what they did reuse, and where it was lost."""

import urllib.request
from urllib.error import URLError

from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.console import Console
from rich.table import Table

from kvferry.errors import NoCluster
from router.hit_rate import KINDS, HitRate, Loss

ASK_TIMEOUT_S = 3.0


def stats(http_url: str, console: Console) -> None:
    """Ask the router whose HTTP door this is. Raises NoCluster."""
    console.print(hit_rate_table(hit_rate_of(read_metrics(http_url))))


def read_metrics(http_url: str) -> str:
    """What the router whose HTTP door this is counts. Raises NoCluster."""
    try:
        with urllib.request.urlopen(f"{http_url}/metrics", timeout=ASK_TIMEOUT_S) as answer:
            text: str = answer.read().decode()
    except (URLError, OSError, ValueError) as error:
        raise NoCluster(f"{http_url} gives no metrics: {error}") from None
    return text


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
    return HitRate(**{kind: tokens.get(kind, 0) for kind in KINDS}, lost=lost)


def hit_rate_table(rate: HitRate) -> Table:
    """The shares add up: what was delivered, and what was lost for each reason."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("prompt tokens", "", "of all"):
        table.add_column(heading, justify="left" if heading == "prompt tokens" else "right")
    for kind, count in zip(KINDS, rate.chain(), strict=True):
        table.add_row(kind, f"{count:,}", f"{rate.rate(count):.1%}")
    table.add_section()
    for loss, count in rate.lost.items():
        table.add_row(f"lost: {loss.value}", f"{count:,}", f"{rate.rate(count):.1%}")
    return table
