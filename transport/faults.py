"""What a faulty wire does, from a seed: which frames it hits, how, and a record of it.

A spec is words: `seed=7 flip=0.01 drop:commit=0.5 refuse@3` flips a bit in one chunk of a hundred,
loses every other Commit, and refuses the third send. A word is `KIND=RATE`, `KIND:FRAME=RATE`,
`KIND@NTH` or `KIND:FRAME@NTH`; the first word that hits a frame is what happens to it. NTH counts
from 1 the frames that the word could hit, on all links together. `wire=tcp` lets the others be.

    drop, duplicate, reorder, delay   what becomes of the frame as a whole
    truncate, flip, swap              its payload: cut off; one bit, of a digest, too; two cells
    stale, foreign                    a cell is one of an earlier chunk; of another transfer
    refuse, cut                       the send fails while the link lives; the link is severed
    half_close                        nothing gets through in this direction any more
    stall                             nothing moves in either direction for a while
"""

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from types import TracebackType
from typing import Self

import numpy as np

from protos.transfer_pb2 import Frame
from transport.cell_runs import layers_of


class Kind(StrEnum):
    DROP = "drop"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    DELAY = "delay"
    TRUNCATE = "truncate"
    FLIP = "flip"
    SWAP = "swap"
    STALE = "stale"
    FOREIGN = "foreign"
    REFUSE = "refuse"
    CUT = "cut"
    HALF_CLOSE = "half_close"
    STALL = "stall"


DAMAGES = frozenset({Kind.TRUNCATE, Kind.FLIP, Kind.SWAP, Kind.STALE, Kind.FOREIGN})
FRAMES = frozenset(field.name for field in Frame.DESCRIPTOR.oneofs_by_name["body"].fields)

NUM_TOLD = 40  # faults in a report
NUM_EARLIER = 4  # transfers, and chunks of each, kept to take stale and foreign cells from

_WORD = re.compile(r"(?P<kind>\w+)(:(?P<frame>\w+))?(=(?P<rate>[\d.]+)|@(?P<nth>\d+))")


@dataclass(frozen=True, slots=True)
class Rule:
    kind: Kind
    frame: str = ""  # any that the kind applies to
    rate: float = 0.0
    nth: int = 0  # instead of a rate; from 1

    def __str__(self) -> str:
        return (
            self.kind
            + (f":{self.frame}" if self.frame else "")
            + (f"@{self.nth}" if self.nth else f"={self.rate:g}")
        )


@dataclass(frozen=True, slots=True)
class FaultSpec:
    seed: int
    rules: tuple[Rule, ...]
    wires: tuple[str, ...] = ()  # that are faulty; empty: all

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError, naming the word."""
        seed, rules, wires = 0, [], []
        for word in text.split():
            if word.startswith("seed="):
                seed = int(word.removeprefix("seed="))
            elif word.startswith("wire="):
                wires.append(word.removeprefix("wire="))
            else:
                rules.append(_rule(word))
        return cls(seed, tuple(rules), tuple(wires))

    def __str__(self) -> str:
        wires = [f"wire={wire}" for wire in self.wires]
        return " ".join([f"seed={self.seed}", *wires, *map(str, self.rules)])

    def concerns(self, wire: str) -> bool:
        return not self.wires or wire in self.wires


@dataclass(frozen=True, slots=True)
class Injected:
    """One fault that happened."""

    number: int  # of the frame, counted over all links and both directions
    kind: Kind
    down: bool  # from prefill to decode
    what: str
    transfer_id: bytes
    num_cells: int = 0  # damaged: whose bytes, or digests, are others now

    def __str__(self) -> str:
        return f"frame {self.number} {'down' if self.down else 'up'}: {self.kind} {self.what}"


class Faults:
    """Draws faults for every frame that passes, and remembers which.

    As a context manager it adds its report to whatever exception passes through.
    """

    def __init__(self, spec: FaultSpec, random: Random | None = None) -> None:
        self.spec = spec
        self.random = random or Random(spec.seed)
        self.log: list[Injected] = []
        self.on = True
        self.num_frames = 0
        self._hits = [0] * len(spec.rules)
        self._keeps = any(rule.kind in (Kind.STALE, Kind.FOREIGN) for rule in spec.rules)
        self._earlier: dict[bytes, deque[bytes]] = {}  # payloads, by key

    @classmethod
    def of(cls, *words: str) -> Self:
        return cls(FaultSpec.parse(" ".join(words)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            error.add_note(self.report())

    def count(self, *kinds: Kind) -> int:
        """How many faults of these kinds have happened; of all, when none is named."""
        return sum(not kinds or each.kind in kinds for each in self.log)

    @property
    def num_damaged_cells(self) -> int:
        return sum(each.num_cells for each in self.log)

    def report(self) -> str:
        lines = [f"faults injected: {len(self.log)} of {self.num_frames} frames, by {self.spec}"]
        lines += [f"  {each}" for each in self.log[-NUM_TOLD:]]
        return "\n".join(lines)

    def draw(
        self, down: bool, frame: Frame, payload: memoryview | None
    ) -> tuple[Kind | None, Frame, memoryview | None]:
        """What happens to a frame, and the frame and payload as they are then."""
        self.num_frames += 1
        kind = self._hit(down, frame, payload) if self.on else None
        changed: tuple[Frame, memoryview | None] = (frame, payload)
        num_cells = 0
        if kind in DAMAGES:
            if payload is not None:
                changed, num_cells = self._damage(kind, frame, payload)
            else:
                frame, num_cells = self._misdirect(kind, frame)
                changed = (frame, None)
            kind = kind if num_cells else None  # a swap of two equal cells is none
        if self._keeps and payload is not None:
            self._keep(_key_of(frame), bytes(payload))
        elif self._keeps and frame.chunk.pool_blocks and not num_cells:
            self._keep(_key_of(frame), frame.chunk.pool_blocks)
        if kind is not None:
            what = _described(frame)
            self.log.append(
                Injected(self.num_frames, kind, down, what, frame.key.transfer_id, num_cells)
            )
        return kind, *changed

    def _hit(self, down: bool, frame: Frame, payload: memoryview | None) -> Kind | None:
        body = frame.WhichOneof("body")
        for index, rule in enumerate(self.spec.rules):
            if rule.frame and rule.frame != body:
                continue
            has_cells = (payload is not None and payload.nbytes) or frame.chunk.pool_blocks
            if rule.kind in DAMAGES and not has_cells:
                continue
            if rule.kind is Kind.REFUSE and not down:
                continue  # only prefill's own sends pass through a fault wire
            self._hits[index] += 1
            hit = self._hits[index] == rule.nth if rule.nth else self.random.random() < rule.rate
            if hit:
                return rule.kind
        return None

    def _damage(
        self, kind: Kind, frame: Frame, payload: memoryview
    ) -> tuple[tuple[Frame, memoryview], int]:
        """The chunk as it is now, and how many of its cells are not what they were."""
        raw = np.frombuffer(payload, dtype=np.uint8).copy()
        num_rows = max(1, len(frame.chunk.digests) // 8)
        width = max(1, raw.nbytes // num_rows)
        rows = raw[: num_rows * width].reshape(num_rows, width)
        random, num_cells = self.random, 1
        match kind:
            case Kind.FLIP:
                bit = random.randrange(8 * (raw.nbytes + len(frame.chunk.digests)))
                if bit >= 8 * raw.nbytes:
                    return (_with_flipped_digest(frame, bit - 8 * raw.nbytes), payload), 1
                raw[bit // 8] ^= 1 << bit % 8
            case Kind.TRUNCATE:
                kept = random.randrange(raw.nbytes)
                raw, num_cells = raw[:kept], num_rows - kept // width
            case Kind.SWAP:
                first, second = random.sample(range(num_rows), 2) if num_rows > 1 else (0, 0)
                if (rows[first] == rows[second]).all():
                    return (frame, payload), 0
                rows[[first, second]], num_cells = rows[[second, first]], 2
            case _:
                row = random.randrange(num_rows)
                cell = self._other_cell(kind, _key_of(frame), width)
                if cell is None or cell == rows[row].tobytes():
                    return (frame, payload), 0
                rows[row] = np.frombuffer(cell, dtype=np.uint8)
        return (frame, raw.data), num_cells

    def _misdirect(self, kind: Kind, frame: Frame) -> tuple[Frame, int]:
        """As `_damage`, of a chunk whose cells are read where they lie: other ones are read."""
        raw = frame.chunk.pool_blocks
        places = [raw[i : i + 8] for i in range(0, len(raw), 8)]
        num_rows, random = len(frame.chunk.digests) // 8, self.random
        per_block = max(1, num_rows // max(1, len(places)))
        block, num_cells = random.randrange(len(places)), per_block
        match kind:
            case Kind.FLIP:
                bit = random.randrange(8 * len(frame.chunk.digests))
                return _with_flipped_digest(frame, bit), 1
            case Kind.TRUNCATE:
                num_cells = num_rows
                del places[block:]
            case Kind.SWAP:
                other = random.randrange(len(places))
                if other == block:
                    return frame, 0
                places[block], places[other] = places[other], places[block]
                num_cells *= 2
            case _:
                place = self._other_cell(kind, _key_of(frame), 8)
                if place is None or place in places:
                    return frame, 0
                places[block] = place
        damaged = Frame()
        damaged.CopyFrom(frame)
        damaged.chunk.pool_blocks = b"".join(places)
        return damaged, num_cells

    def _keep(self, key: bytes, payload: bytes) -> None:
        self._earlier.setdefault(key, deque(maxlen=NUM_EARLIER)).append(payload)
        if len(self._earlier) > NUM_EARLIER:
            del self._earlier[next(iter(self._earlier))]

    def _other_cell(self, kind: Kind, key: bytes, width: int) -> bytes | None:
        """A whole cell of a chunk that has passed before."""
        own = kind is Kind.STALE
        fit = [
            payload
            for whose, payloads in self._earlier.items()
            for payload in payloads
            if (whose == key) == own and len(payload) >= width
        ]
        if not fit:
            return None
        payload = self.random.choice(fit)
        start = width * self.random.randrange(len(payload) // width)
        return payload[start : start + width]


def _rule(word: str) -> Rule:
    match = _WORD.fullmatch(word)
    if match is None or match["kind"] not in list(Kind):
        raise ValueError(f"fault {word!r}: want KIND=RATE or KIND@NTH, KIND one of {_all(Kind)}")
    frame, rate, nth = match["frame"] or "", match["rate"], match["nth"]
    if frame and frame not in FRAMES:
        raise ValueError(f"fault {word!r}: no frame {frame!r}; there are {_all(FRAMES)}")
    if rate is not None and not 0 <= float(rate) <= 1:
        raise ValueError(f"fault {word!r}: a rate is between 0 and 1, not {rate}")
    if nth is not None and int(nth) < 1:
        raise ValueError(f"fault {word!r}: sends are counted from 1")
    return Rule(Kind(match["kind"]), frame, float(rate or 0), int(nth or 0))


def _all(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _with_flipped_digest(frame: Frame, bit: int) -> Frame:
    damaged = Frame()
    damaged.CopyFrom(frame)
    digests = bytearray(frame.chunk.digests)
    digests[bit // 8] ^= 1 << bit % 8
    damaged.chunk.digests = bytes(digests)
    return damaged


def _key_of(frame: Frame) -> bytes:
    return frame.key.SerializeToString(deterministic=True)


def _described(frame: Frame) -> str:
    body, who = frame.WhichOneof("body") or "?", frame.key.transfer_id.hex()[-12:]
    if body != "chunk":
        return f"{body} of {who}/{frame.key.attempt}"
    chunk = frame.chunk
    last = chunk.first_block + chunk.num_blocks - 1
    layers = layers_of(chunk)
    which = f"layer {chunk.layer}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"
    where = f"{which}, blocks {chunk.first_block}-{last}"
    return f"chunk {chunk.seq} of {who}/{frame.key.attempt}: {where}"
