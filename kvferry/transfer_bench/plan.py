"""Which cases a run of the benchmark takes, from what was asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvferry.errors import CommandError
from kvferry.transfer_bench.case import Case
from transport.config import CHUNK_BYTES, WINDOW_BYTES

BASE_BLOCKS = 128  # 64 MiB
LONG_BLOCKS = 512  # 256 MiB: what a transfer needs at its beginning and its end hardly counts
WIRES = ("shm", "tcp", "grpc", "gloo")
DIGESTS = {"both": (True, False), "on": (True,), "off": (False,)}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Each list is varied by itself, from the first of each; so runs stay short."""

    wires: tuple[str, ...] = WIRES
    num_blocks: tuple[int, ...] = (BASE_BLOCKS, LONG_BLOCKS, 16)
    concurrency: tuple[int, ...] = (1, 4)
    pairs: tuple[tuple[int, int], ...] = ((1, 1), (1, 2), (4, 2))
    digests: tuple[bool, ...] = (True, False)
    chunk_bytes: int = CHUNK_BYTES
    window_bytes: int = WINDOW_BYTES


def wanted_of(
    wires: Sequence[str] | None,
    num_blocks: Sequence[int] | None,
    concurrency: Sequence[int] | None,
    pairs: Sequence[str] | None,
    digests: str,
    chunk_kib: int | None,
) -> Wanted:
    """From flags; None is the default. Raises CommandError."""
    usual = Wanted()
    for wire in wires or ():
        if wire not in WIRES:
            raise CommandError(f"no wire {wire!r}: there are {', '.join(WIRES)}")
    if digests not in DIGESTS:
        raise CommandError(f"digests are {', '.join(DIGESTS)}, not {digests!r}")
    chunk_bytes = chunk_kib << 10 if chunk_kib else usual.chunk_bytes
    return Wanted(
        tuple(wires or usual.wires),
        tuple(num_blocks or usual.num_blocks),
        tuple(concurrency or usual.concurrency),
        parse_pairs(pairs) if pairs else usual.pairs,
        DIGESTS[digests],
        chunk_bytes,
        max(usual.window_bytes, 2 * chunk_bytes),
    )


def cases(wanted: Wanted) -> list[Case]:
    """All of them, those of one wire together, each once."""
    found: list[Case] = []
    for wire in wanted.wires:
        base = Case(
            wire,
            wanted.num_blocks[0],
            wanted.concurrency[0],
            *wanted.pairs[0],
            wanted.digests[0],
            wanted.chunk_bytes,
            wanted.window_bytes,
        )
        found.append(base)
        found += [replace(base, digests=on) for on in wanted.digests[1:]]
        ways = [base, replace(base, sealed=True)] if base.digests else [base]
        if base.digests:
            found += [replace(ways[1], digests=on) for on in wanted.digests]
            found.append(replace(base, known=True))
        if wire == "shm":
            found.append(replace(base, show_pool=False))
        found += [replace(way, num_blocks=n) for n in wanted.num_blocks[1:] for way in ways]
        found += [replace(base, concurrency=count) for count in wanted.concurrency[1:]]
        found += [replace(base, prefill_tp=p, decode_tp=d) for p, d in wanted.pairs[1:]]
    return list(dict.fromkeys(found))


def parse_pairs(texts: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """From "PREFILLxDECODE" each. Raises CommandError."""
    pairs = []
    for text in texts:
        prefill, _, decode = text.partition("x")
        if not (prefill.isdecimal() and decode.isdecimal() and int(prefill) and int(decode)):
            raise CommandError(f"a pair of TP degrees looks like 1x4, not {text!r}")
        pairs.append((int(prefill), int(decode)))
    return tuple(pairs)
