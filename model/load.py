"""From an opened checkpoint to a model that computes: the step that needs torch."""

import logging
from functools import partial

import torch

from kernels import host_decoder
from kernels.huge_pages import Memory
from kernels.launch import launches
from kvcache.head_map import HeadMap
from kvcache.spec import CacheSpec
from model.checksum import ChecksumModel
from model.comm import Comm
from model.config import ChecksumConfig, DecoderConfig
from model.decode_graphs import DecodeGraphs
from model.decoder import Decoder
from model.host_decoder import CpuDecoder, fits
from model.model import Model
from model.panel_linear import PanelLinear
from model.shard import Shard
from model.tensor_names import TensorSet
from model.weight_form import WeightForm
from model.weights import DTYPES, dense_by_torch, read_weights, rounded_by_torch

OVERLAP_ROWS = 1024  # halves of 512 rows still fill a card; not measured on one yet
log = logging.getLogger(__name__)


def load(
    config: DecoderConfig | ChecksumConfig,
    tensors: TensorSet | None,
    spec: CacheSpec,
    head_map: HeadMap,
    comm: Comm,
    device: torch.device | str,
    form: WeightForm = "dense",
    num_known: int = 0,
) -> Model:
    """Rank `comm.rank`'s model; dense weights and cache are of one dtype."""
    if isinstance(config, ChecksumConfig):
        return ChecksumModel(config, head_map, comm, spec.block_size, device)
    assert tensors is not None
    assert form == "dense" or torch.device(device).type == "cpu"
    shard = Shard.of(config, head_map, comm.rank)
    dtype = DTYPES[spec.dtype]
    kernel = host_decoder.load() if _suits_cpu(device, dtype) else None
    if kernel is not None:
        team = kernel.team(torch.get_num_threads())
        make_dense = partial(PanelLinear, kernel, team, narrow=form == "bf16", memory=Memory())
        weights = read_weights(config, tensors, shard, device, dtype, make_dense, form)
        if fits(config, weights):
            return CpuDecoder(config, head_map, comm, weights, spec, team, num_known)
    else:
        make_plain = rounded_by_torch if form == "bf16" else dense_by_torch
        weights = read_weights(config, tensors, shard, device, dtype, make_plain, form)
    if num_known:
        log.warning("the first layer of known tokens is not kept: torch computes the decoder")
    on_device = torch.device(device).type == "cuda" and comm.queued
    overlap_rows = OVERLAP_ROWS if on_device else 0
    decoder = Decoder(config, head_map, comm, weights, spec, overlap_rows)
    return DecodeGraphs(decoder) if on_device else decoder


def _suits_cpu(device: torch.device | str, dtype: torch.dtype) -> bool:
    on_cpu = torch.device(device).type == "cpu" and not launches(torch.empty(0))
    return on_cpu and dtype == torch.float32
