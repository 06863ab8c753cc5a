"""What every rank of every worker is made of: its share of the model, and of the cache."""

from dataclasses import dataclass
from typing import Literal

import torch

from engine.rank_group import GroupConfig
from kvcache import host_memory
from kvcache.head_map import HeadInterval, HeadMap
from kvcache.kv_store import KvStore
from kvcache.spec import CacheSpec
from model.comm import Comm
from model.model import Model
from model.source import ModelSource
from prefix_index.index import Manifest
from transport.link import PROTOCOL
from transport.shm_wire import host_id
from worker.cores import share, usable_cores
from worker.errors import CannotStart
from worker.settings import WorkerSettings


@dataclass(frozen=True, slots=True)
class RankParts:
    rank: int
    head_map: HeadMap
    spec: CacheSpec
    model: Model
    store: KvStore

    @property
    def kv_heads(self) -> HeadInterval:
        return self.head_map.kv[self.rank]


def device_of(settings: WorkerSettings, rank: int) -> str:
    """Ranks of one worker stand on one host, one device each."""
    return f"cuda:{rank}" if settings.device == "cuda" else "cpu"


def check_device(settings: WorkerSettings) -> None:
    """Raises CannotStart when the machine has no such devices, or too few."""
    if settings.device == "cuda" and torch.cuda.device_count() < settings.tp:
        raise CannotStart(
            f"{settings.name} needs {settings.tp} CUDA devices and torch sees "
            f"{torch.cuda.device_count()}: set device to cpu, or lower tp"
        )


def group_config(settings: WorkerSettings) -> GroupConfig:
    backend: Literal["memory", "nccl"] = "nccl" if settings.device == "cuda" else "memory"
    return GroupConfig(settings.tp, backend, settings.host, settings.rank_timeout_s)


def build_rank(settings: WorkerSettings, source: ModelSource, comm: Comm) -> RankParts:
    """Load this rank's weights and allocate its blocks. Raises BadModelFile or CannotStart."""
    torch.set_num_threads(settings.threads or share(settings.tp, usable_cores()))
    host_memory.keep_freed()
    head_map = head_map_of(settings, source)
    spec = source.cache_spec(settings.block_size, settings.dtype)
    device = device_of(settings, comm.rank)
    model = source.load(
        head_map,
        comm.rank,
        comm,
        device,
        settings.dtype,
        settings.block_size,
        settings.weights,
        settings.known_tokens,
    )
    try:
        heads, layout = head_map.kv[comm.rank], settings.kv_layout
        store = KvStore(spec, heads, settings.num_blocks, device, layout, share=settings.shows_pool)
    except (RuntimeError, MemoryError) as error:
        gib = spec.bytes_per_block(len(head_map.kv[comm.rank])) * settings.num_blocks / 2**30
        raise CannotStart(
            f"{settings.name} cannot allocate {settings.num_blocks} KV blocks ({gib:.1f} GiB): "
            "lower num_blocks"
        ) from error
    return RankParts(comm.rank, head_map, spec, model, store)


def head_map_of(settings: WorkerSettings, source: ModelSource) -> HeadMap:
    config = source.config
    try:
        return HeadMap.even(config.num_query_heads, config.num_kv_heads, settings.tp)
    except ValueError as error:
        reason = f"{settings.name} cannot run {source.name} at tp {settings.tp}: {error}"
        raise CannotStart(reason) from None


def manifest_of(settings: WorkerSettings, source: ModelSource) -> Manifest:
    """What both ends of a transfer must agree on, and the wires this one offers."""
    spec = source.cache_spec(settings.block_size, settings.dtype)
    config = source.config
    return Manifest(
        protocol=PROTOCOL,
        model=source.name,
        weights=settings.weights,
        namespace=source.namespace(settings.dtype, settings.weights).hex(),
        block_size=settings.block_size,
        dtype=spec.dtype,
        num_layers=config.num_layers,
        num_query_heads=config.num_query_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_context=source.max_context,
        vocab_size=source.vocab_size,
        wires=settings.wires,
        host=host_id(),
        kv_layout=settings.kv_layout.value,
        node=settings.node,
        zone=settings.zone,
    )
