"""`kvferry plan`: how much KV cache a workload needs, from a model's shape alone.

    bytes = layers x planes (K and V) x KV heads x head_dim x tokens x bytes a value x sequences

Each technique makes one of these factors smaller, so their savings multiply. A GiB is 2**30 bytes.
"""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvcache.capacity import (
    demand,
    rank_bytes,
    shared_by,
    stored_as,
    techniques,
    windowed,
)
from kvcache.head_map import HeadMap
from kvcache.spec import CacheSpec
from kvferry.errors import CommandError
from kvferry.explain import size

BYTE_DTYPE = "int8"  # stands in for a width that no dtype has; its bytes are multiplied afterwards

MAX_BYTES_PER_VALUE = 16


@dataclass(frozen=True, slots=True)
class Workload:
    model: str
    num_tokens: int | None  # None: the model's context
    batch: int = 1
    dtype: str = "float16"
    bytes_per_value: float | None = None  # instead of the dtype's
    share_layers: int = 1
    window: int | None = None
    tp: int = 1
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class Geometry:
    """What of a model decides the size of its cache."""

    name: str
    num_query_heads: int
    max_context: int
    spec: CacheSpec


@dataclass(frozen=True, slots=True)
class Estimate:
    """One way to keep the cache, and what it takes."""

    name: str
    sequence_bytes: float
    batch_bytes: float


def llama_70b(block_size: int, dtype: str) -> Geometry:
    """The shape of Llama 3 70B: nobody has to own its weights to plan for it."""
    return Geometry("llama-70b", 64, 131_072, CacheSpec.full(80, 8, 128, block_size, dtype))


PRESETS = {"llama-70b": llama_70b}


def plan(workload: Workload, console: Console) -> None:
    """Print the plan. Raises CommandError for a model or a combination that cannot be."""
    width = workload.bytes_per_value
    if width is not None and not 0 < width <= MAX_BYTES_PER_VALUE:  # NaN is not, either
        raise CommandError(
            f"--bytes-per-value must be more than 0 and at most {MAX_BYTES_PER_VALUE}, got {width}"
        )
    try:
        geometry = geometry_of(workload)
        num_tokens = workload.num_tokens or geometry.max_context
        asked = as_asked(geometry.spec, workload)
        console.print(_headline(geometry, workload, num_tokens), highlight=False, soft_wrap=True)
        console.print(_table(estimates(geometry.spec, asked, workload, num_tokens), workload))
        for line in _details(geometry, asked, workload, num_tokens):
            console.print(line, highlight=False, soft_wrap=True)
    except ValueError as error:
        raise CommandError(f"no such plan: {error}") from None


def geometry_of(workload: Workload) -> Geometry:
    """Of a preset, a GGUF file or a Hugging Face folder. Raises CommandError."""
    from model.errors import BadModelFile
    from model.source import open_model

    dtype = BYTE_DTYPE if workload.bytes_per_value is not None else workload.dtype
    if workload.model in PRESETS:
        return PRESETS[workload.model](workload.block_size, dtype)
    try:
        source = open_model(workload.model)
    except BadModelFile as error:
        more = "" if Path(workload.model).exists() else f"; a plan knows {', '.join(PRESETS)}, too"
        raise CommandError(f"{error}{more}") from None
    spec = stored_as(source.cache_spec(workload.block_size, "float32"), dtype)
    return Geometry(source.name, source.config.num_query_heads, source.max_context, spec)


def as_asked(spec: CacheSpec, workload: Workload) -> CacheSpec:
    if workload.share_layers > 1:
        spec = shared_by(spec, workload.share_layers)
    if workload.window is not None:
        spec = windowed(spec, workload.window)
    return spec


def estimates(
    spec: CacheSpec, asked: CacheSpec, workload: Workload, num_tokens: int
) -> list[Estimate]:
    """The cache as it is, as asked where that differs, and what each technique makes of it."""
    width = 1.0 if workload.bytes_per_value is None else workload.bytes_per_value
    kinds = techniques(spec, workload.window or max(1, num_tokens // 4))
    if workload.bytes_per_value is not None:
        kinds = {name: kind for name, kind in kinds.items() if "FP8" not in name}
    if asked != spec:
        kinds = {"as asked": asked, **kinds}
    found = []
    for name, kind in kinds.items():
        need = demand(kind, num_tokens, workload.batch)
        found.append(Estimate(name, need.request_bytes * width, need.batch_bytes * width))
    return found


def _headline(geometry: Geometry, workload: Workload, num_tokens: int) -> str:
    width = workload.bytes_per_value
    value = workload.dtype if width is None else f"{width:g} bytes a value"
    return (
        f"[bold]{geometry.name}[/]  {geometry.spec.num_layers} layers, "
        f"{geometry.spec.num_kv_heads} KV heads  "
        f"{num_tokens:,} tokens x {_sequences(workload.batch)}  {value}"
    )


def _table(found: list[Estimate], workload: Workload) -> Table:
    table = Table()
    table.add_column("KV cache")
    table.add_column("one sequence", justify="right")
    table.add_column(_sequences(workload.batch), justify="right")
    table.add_column("smaller by", justify="right")
    whole = next(estimate for estimate in found if estimate.name == "as it is")
    for estimate in found:
        table.add_row(
            estimate.name,
            size(estimate.sequence_bytes),
            size(estimate.batch_bytes),
            f"{whole.batch_bytes / estimate.batch_bytes:.1f}x",
        )
    return table


def _details(
    geometry: Geometry, asked: CacheSpec, workload: Workload, num_tokens: int
) -> list[str]:
    blocks = asked.blocks_needed(num_tokens)
    lines = [
        f"{blocks:,} blocks of {workload.block_size} tokens a sequence, "
        f"{blocks * workload.batch:,} in all"
    ]
    if workload.tp > 1:
        width = 1.0 if workload.bytes_per_value is None else workload.bytes_per_value
        heads = HeadMap.even(geometry.num_query_heads, asked.num_kv_heads, workload.tp)
        for rank, interval in enumerate(heads.kv):
            of_one = rank_bytes(asked, num_tokens, len(interval), workload.tp)
            of_all = of_one * workload.batch * width
            heads_held = ", ".join(str(head) for head in range(interval.start, interval.stop))
            lines.append(f"rank {rank}: KV heads {heads_held}: {size(of_all)}")
    return lines


def _sequences(count: int) -> str:
    return "1 sequence" if count == 1 else f"{count} sequences"
