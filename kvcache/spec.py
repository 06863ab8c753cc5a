"""What a layer caches, as data: everything that allocates, names, ships or budgets reads it here.

A model's layers form groups of one kind. A group names its planes: K and V, a latent, scales, a
recurrent state. Each plane has a width and an axis along which tensor parallelism may cut it:

    KV_HEAD      `width` values per token and KV head; a rank stores the KV heads it holds
    CHANNEL      `width` values per token, cut evenly over the ranks
    REPLICATED   `width` values per token, whole on every rank

A STATE group's widths are per request instead of per token. A SHARED group stores nothing: its
layers read the cache of their sources.
"""

import hashlib
from dataclasses import dataclass
from enum import Enum, Flag, auto

ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "int8": 1,
    "int64": 8,
}

MAX_BLOCK_SIZE = 128  # the tile in which attention reduces must hold whole blocks


def is_block_size(size: int) -> bool:
    """A power of two, so that of two sizes the smaller always divides the larger."""
    return 1 <= size <= MAX_BLOCK_SIZE and not size & (size - 1)


class LayerKind(Enum):
    FULL = "full"
    WINDOW = "window"
    SHARED = "shared"
    LATENT = "latent"
    STATE = "state"


class ShardAxis(Enum):
    KV_HEAD = "kv_head"
    CHANNEL = "channel"
    REPLICATED = "replicated"


class Permits(Flag):
    """What may be done with a group's cache beside appending to it."""

    NOTHING = 0
    PREFIX_REUSE = auto()
    TRUNCATION = auto()
    FORK = auto()
    TRANSFER = auto()
    EVERYTHING = PREFIX_REUSE | TRUNCATION | FORK | TRANSFER


@dataclass(frozen=True, slots=True)
class Plane:
    name: str
    width: int
    axis: ShardAxis = ShardAxis.KV_HEAD
    dtype: str | None = None  # None: the cache's own


@dataclass(frozen=True, slots=True)
class LayerGroup:
    kind: LayerKind
    layers: tuple[int, ...]
    planes: tuple[Plane, ...]
    window: int = 0  # tokens a WINDOW layer sees, the newest included
    sinks: int = 0  # first tokens a WINDOW layer keeps for ever
    sources: tuple[int, ...] = ()  # of a SHARED group: for each layer, the one whose cache it reads
    permits: Permits = Permits.EVERYTHING


@dataclass(frozen=True, slots=True)
class CacheSpec:
    num_kv_heads: int
    block_size: int
    dtype: str
    groups: tuple[LayerGroup, ...]

    @classmethod
    def full(
        cls, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: str
    ) -> "CacheSpec":
        """The cache of a decoder all of whose layers see every token."""
        planes = (Plane("k", head_dim), Plane("v", head_dim))
        spec = cls(
            num_kv_heads,
            block_size,
            dtype,
            (LayerGroup(LayerKind.FULL, tuple(range(num_layers)), planes),),
        )
        spec.validate()
        return spec

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    def blocks_needed(self, num_tokens: int, max_chunk_tokens: int = 0) -> int:
        """The most blocks a request of `num_tokens` in all ever holds at once.

        The one answer for admission and for planning. One block table serves every layer, so the
        neediest group decides. `max_chunk_tokens` are the tokens one step may append (0: all of
        them): what lies before a window is let go only between steps.
        """
        chunk = max_chunk_tokens or num_tokens
        return max((self._group_blocks(g, num_tokens, chunk) for g in self.groups), default=0)

    def cell_bytes(self, plane: Plane) -> int:
        """Bytes of one cell: `block_size` tokens of one plane, of one KV head where it has them."""
        return self.block_size * plane.width * self.item_bytes(plane)

    def bytes_per_block(self, kv_heads: int, tp: int = 1) -> int:
        """Bytes one block id stands for, over all layers, on one of `tp` ranks that holds so many
        KV heads.
        """
        return self.block_size * sum(
            len(group.layers) * self.group_bytes(group, kv_heads, tp)
            for group in self.groups
            if group.kind is not LayerKind.STATE
        )

    def group_bytes(self, group: LayerGroup, kv_heads: int, tp: int = 1) -> int:
        """Bytes of one token (of one request, for a STATE group) in one layer, on such a rank."""
        total = 0
        for plane in group.planes:
            width = plane.width
            if plane.axis is ShardAxis.KV_HEAD:
                width *= kv_heads
            elif plane.axis is ShardAxis.CHANNEL:
                width = -(-width // tp)
            total += width * self.item_bytes(plane)
        return total

    def item_bytes(self, plane: Plane) -> int:
        return ITEM_BYTES[plane.dtype or self.dtype]

    def fingerprint(self) -> bytes:
        """16 bytes, equal in every process for specs that store the same of a token: part of what
        names blocks. The block size has no part in it.
        """
        parts: list[object] = ["cache spec 2", self.num_kv_heads, self.dtype]
        for group in self.groups:
            parts += [group.kind.value, group.window, group.sinks, group.permits.value]
            parts += [len(group.layers), *group.layers, len(group.sources), *group.sources]
            parts.append(len(group.planes))
            for plane in group.planes:
                parts += [plane.name, plane.width, plane.axis.value, plane.dtype or self.dtype]
        digest = hashlib.blake2b(digest_size=16)
        for part in parts:
            text = str(part).encode()
            digest.update(len(text).to_bytes(4, "little") + text)
        return digest.digest()

    def validate(self) -> None:
        """Raise ValueError, in one sentence, if no cache can look like this."""
        size = self.block_size
        if not is_block_size(size):
            raise ValueError(f"block size {size} is not a power of two up to {MAX_BLOCK_SIZE}")
        if self.num_kv_heads < 1:
            raise ValueError(f"a cache of {self.num_kv_heads} KV heads holds nothing")
        layers = sorted(layer for group in self.groups for layer in group.layers)
        if not layers or layers != list(range(len(layers))):
            raise ValueError(f"the groups must hold each layer 0..n once, not {layers}")
        for dtype in {self.dtype, *(p.dtype or self.dtype for g in self.groups for p in g.planes)}:
            if dtype not in ITEM_BYTES:
                raise ValueError(f"cache dtype {dtype!r} is not one of {', '.join(ITEM_BYTES)}")
        for group in self.groups:
            self._validate_group(group)

    def _group_blocks(self, group: LayerGroup, num_tokens: int, chunk: int) -> int:
        everything = -(-num_tokens // self.block_size)
        if group.kind in (LayerKind.SHARED, LayerKind.STATE):
            return 0
        if group.kind is not LayerKind.WINDOW:
            return everything
        sinks = -(-group.sinks // self.block_size)
        in_flight = -(-(group.window - 1 + chunk) // self.block_size)
        return min(everything, sinks + in_flight + 1)  # a window need not start on a block's edge

    def _validate_group(self, group: LayerGroup) -> None:
        what = f"the {group.kind.value} group of layers {list(group.layers)}"
        names = [plane.name for plane in group.planes]
        if len(set(names)) < len(names) or any(plane.width < 1 for plane in group.planes):
            raise ValueError(f"{what} needs planes of different names and a width of at least 1")
        if (group.kind is LayerKind.SHARED) == bool(group.planes):
            raise ValueError(f"{what} must {'not ' if group.planes else ''}have planes of its own")
        if (group.window > 0) != (group.kind is LayerKind.WINDOW) or group.window < 0:
            raise ValueError(f"{what} has a window of {group.window} tokens")
        if group.sinks < 0 or (group.sinks and group.kind is not LayerKind.WINDOW):
            raise ValueError(f"{what} keeps {group.sinks} sink tokens")
        heads = any(plane.axis is ShardAxis.KV_HEAD for plane in group.planes)
        if group.kind is LayerKind.LATENT and heads:
            raise ValueError(f"{what} has no KV heads to cut a plane by")
        if group.kind is LayerKind.SHARED:
            self._validate_sources(group, what)
        elif group.sources:
            raise ValueError(f"{what} stores its own cache and reads no other's")

    def _validate_sources(self, group: LayerGroup, what: str) -> None:
        if len(group.sources) != len(group.layers):
            raise ValueError(f"{what} names {len(group.sources)} sources")
        storing = {
            layer
            for other in self.groups
            if other.kind in (LayerKind.FULL, LayerKind.WINDOW, LayerKind.LATENT)
            for layer in other.layers
        }
        for layer, source in zip(group.layers, group.sources, strict=True):
            if source not in storing or source >= layer:
                raise ValueError(f"layer {layer} cannot read the cache of layer {source}")
