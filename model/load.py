"""From an opened checkpoint to a model that computes: the step that needs torch."""

import torch

from kvcache.head_map import HeadMap
from kvcache.spec import CacheSpec
from model.checksum import ChecksumModel
from model.comm import Comm
from model.config import ChecksumConfig, DecoderConfig
from model.decode_graphs import DecodeGraphs
from model.decoder import Decoder
from model.model import Model
from model.shard import Shard
from model.tensor_names import TensorSet
from model.weights import DTYPES, read_weights


def load(
    config: DecoderConfig | ChecksumConfig,
    tensors: TensorSet | None,
    spec: CacheSpec,
    head_map: HeadMap,
    comm: Comm,
    device: torch.device | str,
) -> Model:
    """Rank `comm.rank`'s model; weights and cache are of one dtype."""
    if isinstance(config, ChecksumConfig):
        return ChecksumModel(config, head_map, comm, spec.block_size, device)
    assert tensors is not None
    shard = Shard.of(config, head_map, comm.rank)
    weights = read_weights(config, tensors, shard, device, DTYPES[spec.dtype])
    decoder = Decoder(config, head_map, comm, weights, spec)
    on_one_device = torch.device(device).type == "cuda" and comm.size == 1
    return DecodeGraphs(decoder) if on_one_device else decoder
