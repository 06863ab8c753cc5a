"""Workloads from files, as prompts whose blocks have names.

    *.jsonl with hash_ids          Mooncake: one id for each block of 512 tokens
    *.jsonl with prompt_token_ids  token ids, in blocks of 16
    *.jsonl with input             text sessions (one file, or a folder of them): tokens are taken
                                   to be four bytes of UTF-8, in blocks of 16
    *.csv                          Azure: arrivals and lengths only, so no two prompts share a block

Names are chained digests, made by the function that names a worker's blocks. A line of any JSONL
may say `tenant`, `session_id` and `priority`, too; tenants share no block.
"""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Any

from kvcache.block_hash import PUBLIC, BlockHash, Namespace, name_blocks, tenant_key
from kvferry.errors import CommandError

HASH_ID_TOKENS = 512
BLOCK_TOKENS = 16
BYTES_PER_TOKEN = 4  # of English and code, about, in the vocabularies in use
NAMESPACE = Namespace(bytes(32))


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. `names` are those of its full blocks, `open_names` what they would be if tenants
    shared everything; nothing where none is named.
    """

    at_s: float
    num_tokens: int
    output_tokens: int
    names: tuple[BlockHash, ...]
    open_names: tuple[BlockHash, ...] = ()
    tenant: str = ""
    session: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Arrivals in order of time, the first one at 0."""

    name: str
    block_tokens: int
    arrivals: tuple[Arrival, ...]

    @property
    def has_tenants(self) -> bool:
        return any(each.tenant for each in self.arrivals)

    @property
    def duration_s(self) -> float:
        return self.arrivals[-1].at_s

    def first(self, count: int | None) -> "Trace":
        return self if count is None else replace(self, arrivals=self.arrivals[:count])

    def stretched(self, factor: float) -> "Trace":
        """The same requests, `factor` times as far apart."""
        moved = tuple(replace(each, at_s=each.at_s * factor) for each in self.arrivals)
        return replace(self, arrivals=moved)

    def at_rate(self, requests_per_s: float) -> "Trace":
        """The same requests, so far apart that as many come in the mean; bursts stay bursts."""
        natural = (len(self.arrivals) - 1) / max(self.duration_s, 1e-9)
        return self.stretched(natural / requests_per_s)

    def shrunk(self, factor: int) -> "Trace":
        """Every block, what is left of a prompt after its last one, and every answer hold
        `factor` times fewer tokens, rounded up; which blocks are equal stays as it was.
        """
        size = self.block_tokens // factor
        if factor < 1 or size * factor != self.block_tokens:
            raise CommandError(
                f"--shrink {factor} does not divide the trace's blocks of {self.block_tokens}"
            )

        def small(each: Arrival) -> Arrival:
            tail = each.num_tokens - len(each.names) * self.block_tokens
            num_tokens = len(each.names) * size + -(-tail // factor)
            return replace(
                each, num_tokens=num_tokens, output_tokens=-(-each.output_tokens // factor)
            )

        return replace(self, block_tokens=size, arrivals=tuple(map(small, self.arrivals)))


def read_trace(path: Path) -> Trace:
    """Raises CommandError naming the file and the line that cannot be read."""
    try:
        block_tokens, arrivals = _read(path)
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise CommandError(f"{path} is no trace: {error}") from None
    if not arrivals:
        where = ": a folder is read for its *.jsonl" if path.is_dir() else ""
        raise CommandError(f"{path} holds no request{where}")
    ordered = sorted(arrivals, key=lambda each: each.at_s)
    start_s = ordered[0].at_s
    moved = tuple(replace(each, at_s=each.at_s - start_s) for each in ordered)
    return Trace(path.stem, block_tokens, moved)


def _read(path: Path) -> tuple[int, list[Arrival]]:
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
        return BLOCK_TOKENS, [each for file in files for each in _lines(file, _from_text)]
    if path.suffix == ".csv":
        return HASH_ID_TOKENS, _from_csv(path)
    with path.open() as file:
        first = next((line for line in file if not line.isspace()), "")
    if '"hash_ids"' in first:
        return HASH_ID_TOKENS, _lines(path, _from_hash_ids)
    reader = _from_text if '"input"' in first else _from_tokens
    return BLOCK_TOKENS, _lines(path, reader)


def _lines(path: Path, reader: Callable[[dict[str, Any]], Arrival]) -> list[Arrival]:
    numbered = enumerate(path.read_text().split("\n"), start=1)
    full = ((number, line) for number, line in numbered if line.strip())
    return list(_numbered(path, full, lambda line: reader(json.loads(line))))


def _numbered(
    path: Path, lines: Iterable[tuple[int, Any]], reader: Callable[[Any], Arrival]
) -> Iterator[Arrival]:
    for number, line in lines:
        try:
            arrival = reader(line)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            what = f"{type(error).__name__}: {error}"
            raise CommandError(f"{path}, line {number} is no request: {what}") from None
        if arrival.num_tokens < 1 or arrival.output_tokens < 0:
            lengths = f"{arrival.num_tokens} and {arrival.output_tokens} tokens"
            raise CommandError(f"{path}, line {number}: impossible lengths: {lengths}")
        if not isfinite(arrival.at_s):
            raise CommandError(f"{path}, line {number}: it comes at {arrival.at_s} s")
        yield arrival


def _from_hash_ids(line: dict[str, Any]) -> Arrival:
    """Ids stand for blocks and everything before them; the last id is often of a partial block."""
    num_tokens = int(line["input_length"])
    ids = line["hash_ids"][: num_tokens // HASH_ID_TOKENS]
    return _arrival(line, line["timestamp"] / 1000, num_tokens, int(line["output_length"]), ids, 1)


def _from_tokens(line: dict[str, Any]) -> Arrival:
    tokens = line["prompt_token_ids"]
    return _arrival(
        line, float(line["t"]), len(tokens), int(line["max_tokens"]), tokens, BLOCK_TOKENS
    )


def _from_text(line: dict[str, Any]) -> Arrival:
    tokens = _pseudo_tokens(line["input"])
    answer = _pseudo_tokens(line["output"])
    return _arrival(
        line, line["timestamp"] / 1e6, max(1, len(tokens)), len(answer), tokens, BLOCK_TOKENS
    )


def _arrival(
    line: dict[str, Any],
    at_s: float,
    num_tokens: int,
    output_tokens: int,
    ids: Sequence[int],
    block_size: int,
) -> Arrival:
    tenant = str(line.get("tenant", ""))
    names = _names(ids, block_size, tenant)
    open_names = _names(ids, block_size) if tenant else names
    session, priority = str(line.get("session_id", "")), int(line.get("priority", 0))
    return Arrival(at_s, num_tokens, output_tokens, names, open_names, tenant, session, priority)


def _pseudo_tokens(text: str) -> list[int]:
    """Equal texts give equal tokens, and a text that goes on keeps all but its last one."""
    data = text.encode()
    cuts = range(0, len(data), BYTES_PER_TOKEN)
    return [int.from_bytes(data[start : start + BYTES_PER_TOKEN], "little") for start in cuts]


def _from_csv(path: Path) -> list[Arrival]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))

    def read(numbered: tuple[int, dict[str, str]]) -> Arrival:
        number, row = numbered
        num_tokens = int(row["ContextTokens"])
        own = [number, *range(num_tokens // HASH_ID_TOKENS)][: num_tokens // HASH_ID_TOKENS]
        at_s = datetime.fromisoformat(row["TIMESTAMP"].strip()).timestamp()
        return Arrival(at_s, num_tokens, int(row["GeneratedTokens"]), _names(own, 1))

    # A header, and then the rows as a spreadsheet numbers them.
    return list(_numbered(path, enumerate(enumerate(rows), start=2), read))


def _names(ids: Sequence[int], block_size: int, tenant: str = "") -> tuple[BlockHash, ...]:
    key = tenant_key(tenant) if tenant else PUBLIC
    return tuple(name_blocks(NAMESPACE, key, ids, block_size))
