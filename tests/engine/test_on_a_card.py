"""Whole steps on a card that is not there: nothing mixes devices, nothing waits for the card."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton exists on Linux only")

from bench.gpu import TINY, random_weights
from engine import runner
from engine.runner import Runner
from engine.sampler import Draw, queue_draws
from engine.sampling_params import SamplingParams
from engine.step_plan import SlicePlan, StepPlan
from kvcache.device_cells import DeviceCells
from kvcache.head_map import HeadInterval, HeadMap
from kvcache.kv_store import KvStore
from kvcache.spec import CacheSpec
from model.comm import SingleComm
from model.decode_graphs import DecodeGraphs
from model.decoder import Decoder
from model.layers import RmsNorm
from tests.kernels.absent_card import AbsentCard, NothingWaits, absent_card
from tests.kvcache.late_device import LateDevice
from tests.model.by_kernels import ComputedAgain

VOCABULARY = TINY.vocab_size
PROMPT = SlicePlan(1, 0, tuple(range(10)), (3, 1), wants_logits=True)
TOKEN = SlicePlan(2, 10, (5,), (9, 4), wants_logits=True)


@pytest.fixture
def card() -> Iterator[AbsentCard]:
    with absent_card(90, compiles=False) as card:
        yield card


def sent_there(part: object) -> None:
    """Every tensor of a model becomes one of the card."""
    names = [each.name for each in fields(part)] if is_dataclass(part) else list(vars(part))
    for name in names:
        value = getattr(part, name)
        if isinstance(value, Tensor):
            there = torch.empty(value.shape, dtype=value.dtype, device="cuda")
            object.__setattr__(part, name, there)
        for each in value if isinstance(value, tuple) else (value,):
            if type(each).__module__.startswith("model."):
                sent_there(each)


def decoder_of(*, with_all: bool) -> Decoder:
    """In bf16 on the host; with biases and norms of heads, or without."""
    weights = random_weights(TINY, "cpu", torch.bfloat16)
    heads = HeadMap.even(TINY.num_query_heads, TINY.num_kv_heads, 1)
    if with_all:
        hidden = torch.zeros(TINY.hidden_size, dtype=torch.bfloat16)
        rows = TINY.num_query_heads + TINY.num_kv_heads
        norm = RmsNorm(torch.ones(rows, TINY.head_dim, dtype=torch.bfloat16), 1e-5)
        parts = {"qk_norm": norm, "o_bias_E": hidden, "down_bias_E": hidden}
        layers = tuple(replace(layer, **parts) for layer in weights.layers)  # type: ignore[arg-type]
        weights = replace(weights, layers=layers)
    sizes = (TINY.num_layers, TINY.num_kv_heads, TINY.head_dim, 8)
    return Decoder(TINY, heads, SingleComm(), weights, CacheSpec.full(*sizes, "bfloat16"))


@pytest.mark.parametrize("with_all", [False, True])
def test_a_step_waits_for_nothing(with_all: bool) -> None:
    decoder = decoder_of(with_all=with_all)
    with absent_card(90, compiles=False) as card:
        sent_there(decoder)
        cells = DeviceCells(LateDevice())
        store = KvStore(
            decoder.spec, HeadInterval(0, TINY.num_kv_heads), 64, "cuda", on_device=cells
        )
        with mock.patch.object(runner, "device_of", nullcontext), NothingWaits():
            for slices in ((PROMPT, TOKEN), (TOKEN,), (PROMPT,)):
                logits_RV = Runner(decoder, store).run(StepPlan(1, slices, ((9, 8), (8, 7))))
                assert logits_RV is not None and logits_RV.is_cuda
                assert logits_RV.shape == (len(slices), VOCABULARY)
    kernels = {"_copy_blocks", "_rms_norm", "_rotate_write", "_paged_attention", "_silu_multiply"}
    assert {each.name for each in card.built} == kernels


def test_a_replayed_step_waits_for_nothing() -> None:
    decoder = decoder_of(with_all=False)
    agreed = mock.patch.object(Decoder, "agree", lambda self, well, device: well)
    with absent_card(90, compiles=False), agreed:
        sent_there(decoder)
        cells = DeviceCells(LateDevice())
        store = KvStore(
            decoder.spec, HeadInterval(0, TINY.num_kv_heads), 64, "cuda", on_device=cells
        )
        steps = Runner(DecodeGraphs(decoder, ComputedAgain()), store)
        with mock.patch.object(runner, "device_of", nullcontext), NothingWaits():
            for slices in ((TOKEN,), (TOKEN, TOKEN), (TOKEN,), (TOKEN, TOKEN, TOKEN)):
                logits_RV = steps.run(StepPlan(1, slices))
                assert logits_RV is not None and logits_RV.shape == (len(slices), VOCABULARY)


def test_draws_of_every_kind_are_waited_for_once(card: AbsentCard) -> None:
    kinds = [
        SamplingParams(9, temperature=0.0),
        SamplingParams(9, temperature=0.7),
        SamplingParams(9, temperature=0.7, top_k=5, min_p=0.1),
        SamplingParams(9, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.1),
        SamplingParams(9, logit_bias=((3, 1.0),), allowed_token_ids=(3, 4)),
        SamplingParams(9, min_tokens=3, stop_token_ids=(7,)),
    ]
    draws = [Draw(i, params, 0, (1, 2), (3,), (0,)) for i, params in enumerate(kinds)]
    with NothingWaits():
        logits_RV = torch.empty(len(draws), VOCABULARY, device="cuda")
        for some in (draws, draws[:1], draws[1:2], [draws[2], draws[2]]):
            assert queue_draws(logits_RV, some).shape == (2, len(some))
    assert {each.name for each in card.built} == {"_sample_tokens"}


@pytest.mark.parametrize(
    "wait",
    [
        lambda there: there.sum().item(),
        lambda there: there.nonzero(),
        lambda there: there.cpu(),
        lambda there: torch.tensor([1.0], device="cuda"),
        lambda there: torch.ones(1).to("cuda", non_blocking=True),
        lambda there: there.copy_(torch.ones(1).pin_memory()),
        lambda there: there + torch.ones(1),
    ],
)
@pytest.mark.usefixtures("card")
def test_what_waits_is_found(wait: object) -> None:
    there = torch.empty(1, device="cuda")
    with NothingWaits(), pytest.raises((AssertionError, RuntimeError)):
        wait(there)  # type: ignore[operator]
