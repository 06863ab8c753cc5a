"""Runs every campaign in full, with a progress bar, and says what was measured.

    python tests/system/run_campaigns.py [--share 0.1] [--seed 7] [--only "flip cells"]

Writes bench/out/campaigns.json. Exit code 0 when every campaign holds.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import structlog
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvferry.audit.audit import audit
from tests.system.campaigns import CAMPAIGNS, Outcome
from tests.system.kept_ledgers import kept_ledgers

ROOT = Path(__file__).parents[2]
OUT = ROOT / "bench" / "out" / "campaigns.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--share", type=float, default=1.0, help="of each campaign (default: all)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=CAMPAIGNS, action="append", help="may be given again")
    options = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    console = Console()
    outcomes = asyncio.run(
        run(options.only or list(CAMPAIGNS), options.share, options.seed, console)
    )
    console.print(table(outcomes))
    for outcome in outcomes:
        for what in outcome.broken:
            console.print(f"[red]{outcome.name}: {what}")
    save(outcomes, options.seed, options.share)
    console.print(f"written to {OUT.relative_to(ROOT)}")
    return int(any(outcome.broken for outcome in outcomes))


async def run(names: list[str], share: float, seed: int, console: Console) -> list[Outcome]:
    columns = (
        TextColumn("{task.description:<20}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    outcomes = []
    with Progress(*columns, console=console) as progress:
        for name in names:
            campaign, whole = CAMPAIGNS[name]
            count = max(1, round(whole * share))
            bar = progress.add_task(name, total=count)
            with kept_ledgers() as ledgers:
                outcome = await campaign(count, seed, partial(progress.advance, bar))
            report = audit([ledger.extract() for ledger in ledgers], at_rest=True)
            outcome.broken += [str(broken) for broken in report.broken[:5]]
            outcomes.append(outcome)
    return outcomes


def table(outcomes: list[Outcome]) -> Table:
    made = Table("campaign", "done", "time", "figures", "holds", title="Campaigns")
    for outcome in outcomes:
        figures = ", ".join(f"{name} {value:.5g}" for name, value in outcome.figures.items())
        holds = "[red]no" if outcome.broken else "yes"
        made.add_row(outcome.name, f"{outcome.done:,}", f"{outcome.seconds:.0f} s", figures, holds)
    return made


def save(outcomes: list[Outcome], seed: int, share: float) -> None:
    OUT.parent.mkdir(parents=True, exist_ok=True)
    machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
    campaigns = [asdict(outcome) for outcome in outcomes]
    whole = {"seed": seed, "share": share, "machine": machine, "campaigns": campaigns}
    OUT.write_text(json.dumps(whole, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
