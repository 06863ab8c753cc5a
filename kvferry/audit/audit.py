"""The audit: replay every ledger, then hold both ends of each transfer side by side.

Ledgers of different processes share no clock. Within one, rows are in order; between two, only what
must be so whatever the order is compared, and only for transfers that have ended at both ends. A
transfer whose other end is not there (a process died and left no file, or its pages are gone) is
reported as one-sided: not proved, and no alarm.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterable

from kvcache.ledger_row import Account, Extract, TransferKey
from kvferry.audit.ends import End, Loan, Pair
from kvferry.audit.process import Process
from kvferry.audit.report import Broken, Report, Rule
from transport.books import NO_CHUNK

_COMMITTED = (Account.COMMITTED, Account.ADOPTED)


def audit(extracts: Iterable[Extract], *, at_rest: bool = False) -> Report:
    """Prove conservation, or name what broke it. `at_rest` also wants nothing to be under way."""
    processes = [Process(extract) for extract in extracts]
    report = Report()
    for process in processes:
        if at_rest:
            process.at_rest()
        report.broken += process.broken
        report.lines.append(process.line())
    sides: dict[TransferKey, tuple[dict[int, End], dict[int, End]]] = defaultdict(lambda: ({}, {}))
    fetches: dict[TransferKey, dict[int, End]] = defaultdict(dict)
    for process in processes:
        for key, end in process.ends.items():
            if key.is_fetch:
                fetches[key][process.origin.rank] = end
                continue
            sides[key][process.origin.role == "decode"][process.origin.rank] = end
    lives: dict[int, list[Process]] = defaultdict(list)
    for process in processes:
        lives[_life_of(process.origin.instance)].append(process)
    for prefill, decode in sides.values():
        for side in (prefill, decode):
            _check_fences(side, report)
    for key, (prefill, decode) in sides.items():
        _transfer(key, prefill, decode, lives, report)
    for key, ends in fetches.items():
        _check_fences(ends, report)
        _fetch(key, ends, lives, report)
    return report


def _life_of(instance: str) -> int:
    """How rows of ORDERED name the other end."""
    return zlib.crc32(instance.encode())


def _transfer(
    key: TransferKey,
    prefill: dict[int, End],
    decode: dict[int, End],
    lives: dict[int, list[Process]],
    report: Report,
) -> None:
    ends = [*prefill.values(), *decode.values()]
    for end in decode.values():
        _check_loans(end, lives, report)
    if not all(end.ended for end in ends):
        report.still_open += 1
        return
    if decode:
        _check_group(key, decode, lives, report)
    missing = ""
    for side, others, name in ((prefill, decode, "decode"), (decode, prefill, "prefill")):
        for end in side.values():
            for peer, pair in end.pairs.items():
                if peer not in others and (pair.sent or pair.written or pair.committed):
                    missing = missing or f"{name} rank {peer}"
                    _check_absent(end, peer, pair, name, lives, report)
    for rank, end in prefill.items():
        for peer, pair in end.pairs.items():
            other = decode.get(peer)
            if other is not None:
                _check_pair(end, pair, other, other.pairs.get(rank), rank, report)
    if missing:
        report.one_sided[key] = missing
    else:
        report.proved += 1


def _fetch(
    key: TransferKey, ends: dict[int, End], lives: dict[int, list[Process]], report: Report
) -> None:
    """Every cell had been lent to its rank, and no more is kept than is whole on each."""
    for end in ends.values():
        _check_loans(end, lives, report)
    if not all(end.ended for end in ends.values()):
        report.still_open += 1
        return
    instance = next(iter(ends.values())).origin.instance
    group = {process.origin.rank: process for process in lives[_life_of(instance)]}
    num_kept = ends[0].num_kept if 0 in ends else 0
    for rank, process in group.items():
        num_whole = ends[rank].num_whole if rank in ends else 0
        if num_whole < num_kept and (rank in ends or process.complete):
            what = f"rank 0 keeps {num_kept} blocks, {num_whole} are whole here"
            report.broken.append(Broken(Rule.KEPT_UNFETCHED, process.origin, 0, what, key))
    lenders = {(loan.life, loan.peer) for end in ends.values() for loan in end.borrowed}
    for life, rank in sorted(lenders):
        if all(process.origin.rank != rank for process in lives.get(life, ())):
            report.one_sided[key] = f"lender rank {rank}"
            return
    report.proved_fetches += 1


def _check_fences(side: dict[int, End], report: Report) -> None:
    """Rank 0 has entered who confirmed; what each of these has entered itself must agree."""
    first = side.get(0)
    for rank, seq in first.confirmed.items() if first is not None else ():
        end = side.get(rank)
        if first is not None and end is not None and not end.ended and seq <= first.common_seq:
            what = f"rank {rank} has it {Account(end.state).name}"
            broken = Broken(Rule.CONFIRMED_UNFENCED, end.origin, 0, what, end.key)
            report.broken.append(broken)


def _check_loans(end: End, lives: dict[int, list[Process]], report: Report) -> None:
    for loan in end.borrowed:
        for lender in lives.get(loan.life, ()):
            if lender.origin.rank != loan.peer or not lender.complete or loan.seq > end.common_seq:
                continue
            lent = [each for each in lender.lent.get(end.key, ()) if each.peer == end.origin.rank]
            missing = loan.cells().difference(*(each.cells() for each in lent))
            if missing:
                layer, block, head = min(missing)
                what = f"{lender.origin} has not lent head {head}"
                where = (end.key, layer, block)
                report.broken.append(Broken(Rule.NEVER_LENT, end.origin, loan.seq, what, *where))


def _check_group(
    key: TransferKey, decode: dict[int, End], lives: dict[int, list[Process]], report: Report
) -> None:
    first = decode.get(0)
    if first is None or first.state != Account.ADOPTED:
        return
    for rank, end in decode.items():
        if end.state not in _COMMITTED:
            what = f"rank 0 adopted what rank {rank} has {Account(end.state).name}"
            report.broken.append(Broken(Rule.PARTIAL_GROUP, end.origin, 0, what, key))
    for process in lives.get(_life_of(first.origin.instance), ()):
        old = first.end_seq <= first.common_seq
        if process.complete and process.origin.rank not in decode and old:
            what = "rank 0 adopted what this rank has never seen"
            report.broken.append(Broken(Rule.PARTIAL_GROUP, process.origin, 0, what, key))


def _check_absent(
    end: End, peer: int, pair: Pair, side: str, lives: dict[int, list[Process]], report: Report
) -> None:
    """The other end has no rows of it: that is wrong if all of its rows are there."""
    if not (pair.acked or pair.written or pair.committed) or end.end_seq > end.common_seq:
        return
    for process in lives.get(end.peer_life, ()):
        if process.origin.rank == peer and process.origin.role == side and process.complete:
            what = f"{process.origin} knows nothing of it"
            report.broken.append(Broken(Rule.NO_COUNTERPART, end.origin, 0, what, end.key))


def _check_pair(
    ours: End, pair: Pair, theirs: End, other: Pair | None, rank: int, report: Report
) -> None:
    """`ours` is prefill's end, `theirs` decode's."""

    def say(
        rule: Rule, end: End, what: str, layer: int | None = None, block: int | None = None
    ) -> None:
        report.broken.append(Broken(rule, end.origin, 0, what, ours.key, layer, block))

    if other is None:
        say(Rule.PLAN_DIFFERS, theirs, f"prefill rank {rank} has a part, decode knows of none")
        return
    mine = (sorted(pair.heads), pair.num_layers, pair.num_blocks, pair.block_bytes)
    yours = (sorted(other.heads), other.num_layers, other.num_blocks, other.block_bytes)
    if pair.heads and mine != yours:
        say(Rule.PLAN_DIFFERS, theirs, f"heads, layers, blocks, bytes: sent {mine}, due {yours}")
    if pair.credited and pair.first != other.first and pair.heads:
        say(Rule.PLAN_DIFFERS, theirs, f"first block: sent {pair.first}, due {other.first}")
    for chunk, rows in other.written.items():
        sent = pair.sent.get(chunk, [])
        for row in rows if chunk != NO_CHUNK else ():
            if not any(_covers(there, row) for there in sent):
                what = f"chunk {chunk} was written, {'otherwise' if sent else 'but never'} sent"
                say(Rule.NEVER_SENT, theirs, what, row[0], row[1])
    again = {cell for row in pair.resent.get(NO_CHUNK, ()) for cell in _cells(row)}
    again.update(*(loan.cells() for loan in theirs.borrowed))
    fetched = {cell for row in other.written.get(NO_CHUNK, ()) for cell in _cells(row)}
    for layer, block, head in sorted(fetched - again)[:1]:
        say(
            Rule.NEVER_FETCHED, theirs, f"head {head} was neither sent again nor lent", layer, block
        )
    for chunk in sorted(pair.acked - other.written.keys() - other.asked):
        row = pair.sent.get(chunk, [(-1, 0, 0, 0, 0, 0)])[0]
        say(Rule.ACKED_UNWRITTEN, ours, f"chunk {chunk}", row[0], row[1])
    for chunk in sorted(pair.nacked - other.asked):
        say(Rule.RESENT_UNDAMAGED, ours, f"chunk {chunk} was sent again for no damage")
    if pair.committed and theirs.state not in _COMMITTED:
        what = f"{theirs.origin} is {Account(theirs.state).name}"
        say(Rule.RELEASED_UNCOMMITTED, ours, what)
    if theirs.state in _COMMITTED and not ours.was_sealed:
        say(Rule.COMMITTED_UNSEALED, theirs, f"{ours.origin} is {Account(ours.state).name}")
    lost = sum((pair.num_sends - other.num_arrivals).values())
    report.in_flight_lost += lost


def _cells(row: tuple[int, ...]) -> set[tuple[int, int, int]]:
    layer, first, count, head, num_heads, _ = row
    return Loan(layer, first, count, head, num_heads, peer=0).cells()


def _covers(sent: tuple[int, ...], row: tuple[int, ...]) -> bool:
    """Whether the cells of `row` are among those that were sent as one chunk."""
    layer, first, count, head, num_heads, _ = row
    return (
        sent[0] == layer
        and sent[1] <= first
        and first + count <= sent[1] + sent[2]
        and sent[3] <= head
        and head + num_heads <= sent[3] + sent[4]
    )
