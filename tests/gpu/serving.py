"""What a worker does around its kernels, on a card: cells beside a step, graphs, no waiting.

On a CPU the same runs as far as there is anything to it there.
"""

import time
import traceback
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from bench.gpu import TINY, batch_of, random_weights
from engine.runner import Runner
from engine.sampler import Draw, queue_draws
from engine.sampling_params import SamplingParams
from engine.step_plan import SlicePlan, StepPlan
from kvcache.head_map import HeadInterval, HeadMap
from kvcache.kv_store import KvStore
from kvcache.spec import CacheSpec
from model.comm import SingleComm
from model.decode_graphs import DecodeGraphs
from model.decoder import Decoder
from model.model import Model

BLOCK_SIZE = 16
NUM_BLOCKS = 256
CONFIG = replace(TINY, hidden_size=256, intermediate_size=512, num_query_heads=8, head_dim=64)


def made(device: str) -> tuple[Decoder, KvStore]:
    dtype = torch.float32
    heads = HeadMap.even(CONFIG.num_query_heads, CONFIG.num_kv_heads, 1)
    sizes = (CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.head_dim, BLOCK_SIZE)
    spec = CacheSpec.full(*sizes, str(dtype).removeprefix("torch."))
    weights = random_weights(CONFIG, device, dtype)
    store = KvStore(spec, heads.kv[0], NUM_BLOCKS, device)
    for layer in range(store.num_layers):
        store.layer(layer).normal_(generator=torch.Generator(device).manual_seed(layer))
    return Decoder(CONFIG, heads, SingleComm(), weights, spec), store


def cells_leave_and_arrive_beside_a_step(device: str) -> str:
    """Gathered while the device is busy with what came after the layer, and as they were."""
    _, store = made(device)
    ids, heads = list(range(0, NUM_BLOCKS, 3)), list(range(CONFIG.num_kv_heads))
    want = store.layer(0)[ids].transpose(1, 2).cpu().numpy().view(np.uint8)
    store.gather_cells(0, ids, heads)  # kernels compiled, buffers pinned
    store.layer_written(0)
    busy_s = _keep_busy(device)
    store.layer(1).zero_()
    store.layer_written(1)
    began = time.perf_counter()
    cells = store.gather_cells(0, ids, heads)
    took_s = time.perf_counter() - began
    assert np.array_equal(cells.reshape(-1), want.reshape(-1))
    assert device == "cpu" or took_s < busy_s / 2, f"{took_s:.3f} s beside a step of {busy_s:.3f}"
    assert not store.gather_cells(1, ids, heads).any()
    store.step_ended()
    store.scatter_cells(1, ids, heads, cells)
    assert np.array_equal(store.gather_cells(1, ids, heads), cells)
    return f"{took_s * 1e3:.2f} ms for {cells.nbytes >> 10} KiB beside a step of {busy_s:.2f} s"


def _keep_busy(device: str) -> float:
    """Queues about that many seconds of work."""
    if device == "cpu":
        return 0.0
    square = torch.randn(8192, 8192, device=device)
    torch.cuda.synchronize()
    began = time.perf_counter()
    square @ square
    torch.cuda.synchronize()
    rounds = int(0.3 / (time.perf_counter() - began)) + 1
    began = time.perf_counter()
    for _ in range(rounds):
        square @ square
    torch.cuda.synchronize()
    busy_s = time.perf_counter() - began
    for _ in range(rounds):
        square @ square
    return busy_s


def recorded_steps_give_the_logits_of_the_decoder(device: str) -> str:
    decoder, store = made(device)
    graphs: Model = DecodeGraphs(decoder) if device == "cuda" else decoder
    for num_sequences, context in ((1, 40), (3, 40), (3, 100), (8, 17), (2, 40)):
        batch = batch_of(num_sequences, context, 1, BLOCK_SIZE, device, NUM_BLOCKS)
        want = decoder.forward(batch, store, lambda layer: None)
        got = graphs.forward(batch, store, lambda layer: None)
        assert want is not None and got is not None
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    return "5 shapes"


def a_step_does_not_wait_for_the_device(device: str) -> str:
    """Prompts and decode steps, recorded or not; an answer is only waited for by who reads it."""
    decoder, store = made(device)
    models: list[Model] = [decoder, *([DecodeGraphs(decoder)] if device == "cuda" else [])]
    prompt = SlicePlan(1, 0, tuple(range(40)), (3, 1, 7), wants_logits=True)
    token = SlicePlan(2, 40, (5,), (9, 4, 2), wants_logits=True)
    plans = [StepPlan(1, (prompt, token)), StepPlan(2, (token,)), StepPlan(3, (token,), ((9, 8),))]
    for model in models:
        runner = Runner(model, store)
        for plan in plans:
            runner.run(plan)
        _sync_is("error", device)
        try:
            for plan in plans:
                runner.run(plan)
        finally:
            _sync_is("default", device)
    return f"{len(models) * len(plans)} steps"


def draws_wait_for_nothing(device: str) -> str:
    """Of every kind, until somebody reads the tokens."""
    kinds = (
        SamplingParams(9, temperature=0.0),
        SamplingParams(9, temperature=0.7, min_p=0.1),
        SamplingParams(9, top_k=40, top_p=0.9, repetition_penalty=1.1, logit_bias=((3, 1.0),)),
    )
    draws = [Draw(row, params, 0, (1, 2), (3,)) for row, params in enumerate(kinds)]
    logits = torch.randn(len(draws), 5_000, device=device)
    want = queue_draws(logits, draws).tolist()
    _sync_is("error", device)
    try:
        got = queue_draws(logits, draws)
    finally:
        _sync_is("default", device)
    assert got.tolist() == want and want[1] == [1, 1, 1]
    return f"{len(draws)} kinds"


def _sync_is(mode: str, device: str) -> None:
    if device == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


CHECKS: tuple[Callable[[str], str], ...] = (
    cells_leave_and_arrive_beside_a_step,
    recorded_steps_give_the_logits_of_the_decoder,
    a_step_does_not_wait_for_the_device,
    draws_wait_for_nothing,
)


def wire_gb_s(device: str, num_bytes: int = 64 << 20) -> dict[str, float]:
    """Bytes a second between a pool and the host, and of copies of the same bytes beside them."""
    spec = CacheSpec.full(1, 8, 128, BLOCK_SIZE, "bfloat16")
    num_blocks = max(2, num_bytes // spec.bytes_per_block(8))
    store = KvStore(spec, HeadInterval(0, 8), num_blocks, device)
    ids, heads = torch.randperm(num_blocks).tolist(), list(range(8))
    cells = store.gather_cells(0, ids, heads)
    there = store.layer(0).clone()
    pinned = torch.empty(there.shape, dtype=there.dtype, pin_memory=device == "cuda")
    actions: dict[str, Callable[[], object]] = {
        "gather for the wire": lambda: store.gather_cells(0, ids, heads, out=cells),
        "copy to pinned memory": lambda: pinned.copy_(there),
        "scatter on arrival": lambda: store.scatter_cells(0, ids, heads, cells),
        "copy from pinned memory": lambda: there.copy_(pinned),
    }
    return {name: cells.nbytes / _seconds(action, device) / 1e9 for name, action in actions.items()}


def _seconds(action: Callable[[], object], device: str, rounds: int = 5) -> float:
    action()
    began = time.perf_counter()
    for _ in range(rounds):
        action()
        if device == "cuda":
            torch.cuda.synchronize()
    return (time.perf_counter() - began) / rounds


def num_failed(device: str) -> int:
    """Runs every check and says how it went."""
    failed = 0
    for check in CHECKS:
        what = check.__name__.replace("_", " ")
        try:
            print(f"ok     {what}: {check(device)}", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED {what}")
            traceback.print_exc()
    for name, speed in wire_gb_s(device).items():
        print(f"  {name:<34}{speed:8.2f} GB/s")
    return failed
