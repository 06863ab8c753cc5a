"""How much memory a cache takes, and how many requests a rank's memory holds.

    bytes of a request = sum over layer groups of
        layers x tokens stored x bytes of its planes per token    (state groups: once per request)
    blocks of a pool   = (memory x utilisation - weights / tp - activations) / bytes of a block

Planes are cut over the ranks as their axis says; shared layers store nothing. Bytes count stored
tokens exactly; whole blocks, which admission goes by, are `CacheSpec.blocks_needed`, here as there.
"""

from dataclasses import dataclass, replace

from kvcache.head_map import HeadMap
from kvcache.spec import CacheSpec, LayerGroup, LayerKind

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Demand:
    """What `batch` requests of `num_tokens` each ask of a whole replica."""

    num_tokens: int
    batch: int
    request_bytes: int
    request_blocks: int

    @property
    def batch_bytes(self) -> int:
        return self.batch * self.request_bytes


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What a rank has, and what else than the cache wants it."""

    total_bytes: int
    utilisation: float = 0.9
    weight_bytes: int = 0  # of the whole model
    activation_bytes: int = 0


def demand(spec: CacheSpec, num_tokens: int, batch: int = 1) -> Demand:
    request_bytes = rank_bytes(spec, num_tokens, spec.num_kv_heads)
    return Demand(num_tokens, batch, request_bytes, spec.blocks_needed(num_tokens))


def rank_bytes(spec: CacheSpec, num_tokens: int, kv_heads: int, tp: int = 1) -> int:
    """Bytes one request takes on one of `tp` ranks, which holds `kv_heads` of the KV heads."""
    return sum(
        len(group.layers) * _times_stored(group, num_tokens) * spec.group_bytes(group, kv_heads, tp)
        for group in spec.groups
    )


def pool_blocks(spec: CacheSpec, memory: RankMemory, head_map: HeadMap) -> int:
    """Blocks that fit every rank: the one with most KV heads decides, for all share block ids.

    Raises ValueError when the rest leaves no memory for even one.
    """
    tp = head_map.tp
    usable = int(memory.total_bytes * memory.utilisation)
    taken = -(-memory.weight_bytes // tp) + memory.activation_bytes
    block_bytes = spec.bytes_per_block(max(len(kv) for kv in head_map.kv), tp)
    if usable - taken < block_bytes:
        raise ValueError(
            f"a rank's {usable / GIB:.1f} usable GiB leave no block of {block_bytes} bytes beside "
            f"{taken / GIB:.1f} GiB of weights and activations at tensor parallel size {tp}"
        )
    return (usable - taken) // block_bytes


def max_requests(spec: CacheSpec, num_blocks: int, num_tokens: int) -> int:
    """How many requests of `num_tokens` a pool holds at once when they share nothing."""
    return num_blocks // max(1, spec.blocks_needed(num_tokens))


def stored_as(spec: CacheSpec, dtype: str) -> CacheSpec:
    """The same cache with its values in another type."""
    return _valid(replace(spec, dtype=dtype))


def shared_by(spec: CacheSpec, factor: int) -> CacheSpec:
    """The same cache with each run of `factor` layers reading the first one's."""
    if factor < 2:
        raise ValueError(f"layers shared by {factor} are not shared")
    group = _full_group(spec)
    own = tuple(layer for layer in group.layers if layer % factor == 0)
    rest = tuple(layer for layer in group.layers if layer % factor)
    sources = tuple(layer - layer % factor for layer in rest)
    shared = LayerGroup(LayerKind.SHARED, rest, (), sources=sources, permits=group.permits)
    return _valid(replace(spec, groups=(replace(group, layers=own), shared)))


def windowed(spec: CacheSpec, window: int, sinks: int = 0) -> CacheSpec:
    """The same cache keeping only the `window` newest tokens and the `sinks` first ones."""
    group = replace(_full_group(spec), kind=LayerKind.WINDOW, window=window, sinks=sinks)
    return _valid(replace(spec, groups=(group,)))


def techniques(spec: CacheSpec, window: int) -> dict[str, CacheSpec]:
    """The cache as it is, and what each way of shrinking it would make of it."""
    fp8 = stored_as(spec, "float8_e4m3fn")
    return {
        "as it is": spec,
        "FP8": fp8,
        "layers shared by pairs": shared_by(spec, 2),
        f"window of {window:,} tokens": windowed(spec, window),
        "FP8 and pairs": shared_by(fp8, 2),
    }


def _times_stored(group: LayerGroup, num_tokens: int) -> int:
    """How many tokens of a request a layer stores; a state is stored once whatever they are."""
    if group.kind is LayerKind.STATE:
        return 1
    if group.kind is LayerKind.WINDOW:
        return min(num_tokens, group.sinks + group.window)
    return num_tokens


def _full_group(spec: CacheSpec) -> LayerGroup:
    if len(spec.groups) != 1 or spec.groups[0].kind is not LayerKind.FULL:
        kinds = ", ".join(group.kind.value for group in spec.groups)
        raise ValueError(f"only a cache whose layers are all full can be changed, not {kinds}")
    return spec.groups[0]


def _valid(spec: CacheSpec) -> CacheSpec:
    spec.validate()
    return spec
