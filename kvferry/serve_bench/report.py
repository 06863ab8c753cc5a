"""What a run found, for people: two tables and the sentences that qualify them."""

import json
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kvferry.replay.figures import imbalance, spread_of
from kvferry.replay.report import losses
from kvferry.serve_bench.results import Results

LATE_MS = 20.0  # beyond this the client, not the cluster, is what was measured


def show(results: Results, console: Console) -> None:
    console.print(times(results))
    if results.split_is_known:
        console.print(losses([results.figures("live")]))
    tenants = results.tenants()
    if len(tenants) > 1:
        console.print(by_tenant(tenants))
    for line in remarks(results):
        console.print(line, highlight=False, soft_wrap=True)


def times(results: Results) -> Table:
    """Since a request was due, in milliseconds."""
    found, served = results.summary(), results.served
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column(f"{len(served)} of {results.num_planned} requests served")
    for heading in ("mean", "p50", "p90", "p99"):
        made.add_column(heading, justify="right")
    totals = spread_of([reply.total_ms for reply in served])
    for what, spread in (
        ("to the first token, ms", found["ttft_ms"]),
        ("for each further token, ms", found["tpot_ms"]),
        ("longest pause in an answer, ms", found["worst_pause_ms"]),
        ("to the end, ms", totals),
        ("sent too late by the client, ms", found["late_ms"]),
    ):
        made.add_row(what, *(f"{value:,.1f}" for value in spread.values()))
    return made


def by_tenant(tenants: dict[str, Results]) -> Table:
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("tenant", "served", "failed", "hit rate", "first token p50, ms", "p99, ms"):
        made.add_column(heading, justify="left" if heading == "tenant" else "right")
    for name, each in tenants.items():
        rate, spread = each.hit_rate, spread_of([reply.ttft_ms for reply in each.served])
        failed = str(sum(each.failed.values()))
        share = f"{rate.rate(rate.delivered):.1%}"
        p50, p99 = f"{spread['p50']:,.1f}", f"{spread['p99']:,.1f}"
        made.add_row(name or "(none)", str(len(each.served)), failed, share, p50, p99)
    return made


def remarks(results: Results) -> list[str]:
    found, rate = results.summary(), results.hit_rate
    lines = [
        f"{found['requests_per_s']:.2f} requests and {found['tokens_per_s']:.1f} tokens of answers"
        f" a second over {results.duration_s:.1f} s; {rate.rate(rate.delivered):.1%} of the prompt"
        f" tokens were found in place, {rate.rate(rate.fetched):.1%} fetched from other workers;"
        f" {found['shipped_bytes'] / 1e6:.1f} MB shipped,"
        f" {found['retried']} retried"
    ]
    if results.targets is not None and results.in_time is not None:
        lines.append(
            f"{results.in_time:.1%} of the requests sent were in time:"
            f" {results.targets.ttft_ms / 1000:g} s to the first token,"
            f" {results.targets.tpot_ms / 1000:g} s for each further one"
        )
    for code, count in sorted(results.failed.items()):
        why = next(each.message for each in results.replies if each.code == code)
        lines.append(f"failed: {count} with {code}" + (f", such as: {why[:200]}" if why else ""))
    computed = results.computed_tokens()
    if computed:
        shares = ", ".join(f"{name} {tokens:,}" for name, tokens in computed.items())
        uneven = imbalance(computed.values())
        lines.append(f"prompt tokens computed: {shares}; max/mean {uneven:.2f}")
    if not results.split_is_known:
        lines.append(
            "why tokens were computed is not known: other requests were counted with these, or no"
            " router's --http was named"
        )
    if found["late_ms"]["p99"] > LATE_MS:
        lines.append(
            f"the client was late by up to {found['late_ms']['p99']:.0f} ms (p99): it is part of"
            " the times above"
        )
    return lines


def write(path: Path, results: Results, about: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tenants = {name: each.summary() for name, each in results.tenants().items()}
    found = {**about, **results.summary(), "tenants": tenants, "replies": results.rows()}
    path.write_text(json.dumps(found, indent=2) + "\n")
