"""`kvferry bench transfer`: load on every wire, beside what the wire itself could carry."""

import os
import statistics
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvferry.bench_report import Row, line, plot, publish, row
from kvferry.errors import CommandError
from kvferry.transfer_bench.alone import can as can_alone
from kvferry.transfer_bench.case import Case
from kvferry.transfer_bench.pair import Pair, processes
from kvferry.transfer_bench.peers import PEERS, RunningPeer, default_python
from kvferry.transfer_bench.plan import Wanted, cases

NOT_INSTALLED = "not installed (make bench-peers-env)"
LEAST_RUNS = 7  # for a median worth quoting
WARM_UPS = 3  # links are opened, memory is touched, and the system learns what a connection takes


async def bench_transfer(
    wanted: Wanted,
    runs: int,
    peer_python: str | None,
    out: Path,
    picture: Path | None,
    console: Console,
) -> list[Row]:
    """Measure, show, and leave the rows in `out`. Raises CommandError."""
    if runs < 1:
        raise CommandError(f"cannot repeat {runs} times")
    planned = cases(wanted)
    load_before = os.getloadavg()[0]
    async with AsyncExitStack() as stack:
        pair = await stack.enter_async_context(processes())
        peers, missing = await _start_peers(planned[0], peer_python, stack)
        bar = stack.enter_context(
            Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )
        )
        task = bar.add_task("", total=len(planned) * runs)
        rows: list[Row] = []
        for case in planned:
            bar.update(task, description=str(case))
            fresh = await _measure(
                pair, case, planned[0], peers, missing, runs, lambda: bar.advance(task)
            )
            for each in fresh:
                console.print(line(each), highlight=False, soft_wrap=True)
            rows += fresh
    rows += _digest_costs(planned, rows)
    for name, why in missing.items():
        console.print(f"{name}: not measured: {why}", highlight=False, soft_wrap=True)
    about = {"bench": "transfer", "not_measured": missing}
    publish(out, rows, console, load_before, about)
    if picture is not None:
        plot(picture, rows, console)
    return rows


async def _start_peers(
    base: Case, python: str | None, stack: AsyncExitStack
) -> tuple[list[RunningPeer], dict[str, str]]:
    """Those that are installed, and why the others are not there."""
    running: list[RunningPeer] = []
    missing: dict[str, str] = {}
    for peer in PEERS:
        try:
            made = await RunningPeer.start(peer, python or default_python(), base.total_bytes)
        except CommandError as error:
            absent = "ModuleNotFoundError" in str(error)
            missing[peer.name] = NOT_INSTALLED if absent else str(error)
        else:
            running.append(made)
            stack.push_async_callback(made.close)
    return running, missing


async def _measure(  # type: ignore[no-untyped-def]
    pair: Pair,
    case: Case,
    base: Case,
    peers: list[RunningPeer],
    missing: dict[str, str],
    runs: int,
    advance,
) -> list[Row]:
    """Ours, the limit and the peers in turn, so that what else the machine does hits all alike, and
    each first as often as the others, so that who comes before whom does, too.
    """
    # Peers hold as many bytes as the base case, and make no digests at any time.
    comparable = replace(case, wire=base.wire, known=base.known, sealed=base.sealed) == base
    rivals = [peer for peer in peers if case.wire in peer.peer.wires] if comparable else []
    found = defaultdict[str, list[float]](list)
    gigabytes = case.total_bytes / 1e9

    async def own() -> None:
        began = await _cpu_ms_per_mib(pair, case)
        found["ours"].append(gigabytes / await pair.seconds(case))
        found["own cpu"].append(await _cpu_ms_per_mib(pair, case) - began)
        if case.sealed and case.digests:
            found["sealing"].append(await pair.sealing_seconds() * 1e3)

    async def limit() -> None:
        began = await _cpu_ms_per_mib(pair, case)
        found["limit"].append(gigabytes / await pair.limit_seconds(case))
        found["limit cpu"].append(await _cpu_ms_per_mib(pair, case) - began)

    async def cold() -> None:
        found["cold"].append(gigabytes / await pair.limit_seconds(case, cold=True))

    async def alone() -> None:
        found["alone"].append(gigabytes / await pair.alone_seconds())

    async def rival(peer: RunningPeer) -> None:
        found[peer.peer.name].append(gigabytes / await peer.seconds(case.chunk_bytes))

    turns = deque[Callable[[], Awaitable[None]]]([own, limit, cold])
    turns.extend([alone] if can_alone(case) else [])
    turns.extend(partial(rival, peer) for peer in rivals)
    async with pair.running(case):
        for _ in range(WARM_UPS):
            await pair.seconds(case)
        for _ in range(runs):
            for measure in turns:
                await measure()
            turns.rotate(1)
            advance()
    return _rows_of(case, base, found, [peer.peer.name for peer in rivals], missing, comparable)


def _rows_of(
    case: Case,
    base: Case,
    found: Mapping[str, list[float]],
    rivals: Sequence[str],
    missing: Mapping[str, str],
    comparable: bool,
) -> list[Row]:
    ours, limit = found["ours"], found["limit"]
    absent = [peer.name for peer in PEERS if peer.name in missing and case.wire in peer.wires]
    rows = [row(str(case), ours, limit, name, found[name]) for name in rivals]
    if not rows:
        note = f"{', '.join(absent)}: not installed" if absent and comparable else None
        rows = [row(str(case), ours, limit, note)]
    if "sealing" in found:
        rows.append(row(f"{case}: digesting before it", found["sealing"], unit="ms"))
    if "alone" in found:
        rows.append(row(f"{case}: without the transport", found["alone"], limit))
    rows.append(row(f"{case}: beside the limit, cold to cold", ours, found["cold"]))
    if replace(case, wire=base.wire, digests=base.digests) == base:
        what = f"{case}: CPU of both ends"
        rows.append(row(what, found["own cpu"], found["limit cpu"], unit="ms/MiB"))
    return rows


async def _cpu_ms_per_mib(pair: Pair, case: Case) -> float:
    """What both ends have used so far, for each MiB that the case carries."""
    return sum(await pair.cpu_seconds()) * 1e3 / (case.total_bytes / 2**20)


def _digest_costs(planned: list[Case], rows: list[Row]) -> list[Row]:
    """What digests take off the throughput, for each case measured with and without them."""
    found = {each.what: each for each in rows}
    costs = []
    for case in planned:
        with_them, without = found.get(str(case)), found.get(str(replace(case, digests=False)))
        if case.digests and with_them is not None and without is not None:
            cost = round((1 - with_them.ours / without.ours) * 100, 1)
            spread = round(statistics.fmean([with_them.spread, without.spread]), 3)
            what = f"{case}: cost of digests"
            costs.append(Row(what, cost, "%", None, None, None, None, None, with_them.runs, spread))
    return costs
