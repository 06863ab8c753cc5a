"""What a worker tells the cluster about itself: who it is, what it can serve, how busy it is.

A record is announced as JSON. Unknown fields are ignored, so a newer worker may say more than an
older router understands; a missing or wrong field makes the record foreign.
"""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from hashlib import blake2b
from operator import attrgetter
from typing import Protocol, Self

from pydantic import TypeAdapter, ValidationError

from kvcache.spec import MAX_BLOCK_SIZE, is_block_size
from prefix_index.quarantine import Quarantine

MAX_NAME_CHARS = 200

# Everything else in a manifest must be equal for two workers to work together: `wires` needs only
# one in common, `model` is a label (the namespace is the identity of what was loaded), `host`
# decides only whether memory can be shared, `node` and `zone` say how far apart they are, and cells
# are carried between blocks of any size and pools of any layout.
MAY_DIFFER = frozenset({"model", "wires", "host", "block_size", "kv_layout", "node", "zone"})


class MalformedRecord(ValueError):
    """These bytes are not a worker record; the message says where they stop being one."""


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What must agree before KV blocks may pass between two workers."""

    protocol: int
    model: str
    weights: str = field(default="dense", kw_only=True)  # the form they are kept in
    namespace: str  # hex
    block_size: int
    dtype: str
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    vocab_size: int
    wires: tuple[str, ...]  # preferred first
    host: str = ""  # equal for workers that can share memory; empty when none can
    kv_layout: str = "head-major"
    node: str = ""  # where it runs, as far as anyone has said
    zone: str = ""

    def mismatch(self, other: "Manifest") -> str | None:
        """Why the two cannot work together, in one sentence; None when they can."""
        if _MUST_EQUAL(self) != _MUST_EQUAL(other):
            for each in fields(Manifest):
                mine, theirs = getattr(self, each.name), getattr(other, each.name)
                if mine != theirs and each.name not in MAY_DIFFER:
                    return f"{each.name} differs: {mine} here, {theirs} there"
        for size in (self.block_size, other.block_size):
            if not is_block_size(size):
                return f"block_size {size} is not a power of two up to {MAX_BLOCK_SIZE}"
        if not shared_wires(self, other):
            apart = ", on different hosts" if "shm" in self.wires and "shm" in other.wires else ""
            return (
                f"wires differ: {', '.join(self.wires) or 'none'} here, "
                f"{', '.join(other.wires) or 'none'} there, none shared{apart}"
            )
        return None

    def digest(self) -> bytes:
        """16 bytes over the fields that must be equal: equal exactly when those fields are."""
        must_equal = {key: value for key, value in asdict(self).items() if key not in MAY_DIFFER}
        text = json.dumps(must_equal, sort_keys=True, separators=(",", ":"))
        return blake2b(text.encode(), digest_size=16, person=b"kvferry-manifest").digest()


_MUST_EQUAL = attrgetter(*(each.name for each in fields(Manifest) if each.name not in MAY_DIFFER))


class OffersWires(Protocol):
    """What of a worker decides over which wires it can be reached: a manifest, or a summary."""

    @property
    def wires(self) -> tuple[str, ...]: ...

    @property
    def host(self) -> str: ...


def shared_wires(prefill: OffersWires, decode: OffersWires) -> list[str]:
    """The wires both offer, in the order in which the prefill worker prefers them."""
    one_host = prefill.host != "" and prefill.host == decode.host
    shared = [wire for wire in prefill.wires if wire in decode.wires]
    return [wire for wire in shared if wire != "shm" or one_host]


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a worker is, as of its last heartbeat."""

    running: int
    waiting: int
    queued_tokens: int
    free_blocks: int
    total_blocks: int
    prefill_ms_per_token: float
    decode_step_ms: float
    draining: bool
    # The means over the steps that took `decode_step_ms` in the mean: sequences, and the tokens of
    # their contexts. A worker that says neither has not measured them.
    step_sequences: float = 0.0
    step_context_tokens: float = 0.0
    context_tokens: int = 0  # of all sequences it streams now
    computed_prompts: int = 0  # in this life, whoever sent them
    quarantines: tuple[Quarantine, ...] = ()  # a decode worker's

    def to_json(self) -> bytes:
        return _LOAD.dump_json(self)

    @staticmethod
    def from_json(text: bytes | str) -> "Load":
        """Raises MalformedRecord."""
        try:
            return _LOAD.validate_json(text)
        except ValidationError as error:
            raise MalformedRecord(_first_complaint(error)) from None


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One life of one worker. `instance` is random for each process life, `epoch` grows with them.

    `kv_intervals` are the global KV heads [start, stop) of each rank, in step with
    `rank_addresses`.
    """

    name: str
    role: Role
    instance: str
    epoch: int
    address: str
    system_address: str
    rank_addresses: tuple[str, ...]
    kv_intervals: tuple[tuple[int, int], ...]
    manifest: Manifest
    load: Load

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= MAX_NAME_CHARS:
            raise ValueError(f"a worker's name has 1 to {MAX_NAME_CHARS} characters: {self.name!r}")
        if self.epoch < 0:
            raise ValueError(f"worker {self.name}: epoch {self.epoch} is negative")

    def with_load(self, load: Load) -> Self:
        return replace(self, load=load)

    def to_json(self) -> bytes:
        return _RECORD.dump_json(self)

    @staticmethod
    def from_json(text: bytes | str) -> "WorkerRecord":
        """Raises MalformedRecord."""
        try:
            return _RECORD.validate_json(text)
        except ValidationError as error:
            raise MalformedRecord(_first_complaint(error)) from None


def _first_complaint(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"])) or "record"
    return f"{place}: {first['msg']}"


_LOAD = TypeAdapter(Load)
_RECORD = TypeAdapter(WorkerRecord)
