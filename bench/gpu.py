"""How long decode and prefill steps of a Llama-3-8B take on a GPU, beside torch's own attention.

`make bench-gpu`: random weights in bf16 (16 GB). The peer is the same arithmetic written plainly in
torch: a contiguous cache, `scaled_dot_product_attention`, and CUDA graphs for decode as ours has.
The limit of a decode step is the time to read weights and cache at the bandwidth of a copy; that of
prefill, its multiplications at the rate of one large matrix product; both measured in the same run.

    --tiny --device cpu   the same steps of a tiny model, to see that the script runs
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from kvcache.head_map import HeadMap
from kvcache.kv_store import KvStore
from kvcache.spec import CacheSpec
from kvferry.bench_report import Row, publish, row
from model.batch import Batch
from model.comm import SingleComm
from model.config import DecoderConfig
from model.decode_graphs import CudaRecorder, DecodeGraphs
from model.decoder import Decoder
from model.layers import RmsNorm
from model.linear import DenseLinear
from model.model import Model
from model.rope import inverse_frequencies, rotation
from model.weights import DecoderWeights, LayerWeights

OUT = Path("bench/out/gpu.json")
LLAMA_8B = DecoderConfig(
    name="Llama-3-8B shape, random weights",
    architecture="llama",
    vocab_size=128_256,
    hidden_size=4_096,
    intermediate_size=14_336,
    num_layers=32,
    num_query_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=500_000.0,
    rope_scaling=None,
    rms_norm_eps=1e-5,
    max_context=8_192,
    tied_embeddings=False,
)
TINY = replace(
    LLAMA_8B, name="tiny", vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2,
    num_query_heads=4, num_kv_heads=2, head_dim=16,
)  # fmt: skip
PEER = "torch SDPA"


@dataclass(frozen=True)
class Sizes:
    config: DecoderConfig
    decode: tuple[tuple[int, int], ...]  # (batch, context)
    prefill: tuple[int, ...]
    copied_bytes: int
    product: int  # of square matrices
    block_size: int = 16
    runs: int = 9


FULL = Sizes(LLAMA_8B, ((1, 2_048), (16, 2_048), (64, 2_048)), (512, 4_096), 4 << 30, 8_192)
SMALL = Sizes(TINY, ((1, 40), (3, 40)), (32,), 1 << 20, 64, runs=2)


def random_weights(config: DecoderConfig, device: str, dtype: torch.dtype) -> DecoderWeights:
    generator = torch.Generator(device).manual_seed(0)

    def matrix(outputs: int, inputs: int) -> Tensor:
        shape = (outputs, inputs)
        values = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        return values.mul_(inputs**-0.5)

    def norm() -> RmsNorm:
        return RmsNorm(torch.ones(config.hidden_size, device=device, dtype=dtype), 1e-5)

    hidden, heads = config.hidden_size, config.num_query_heads * config.head_dim
    projections = heads + 2 * config.num_kv_heads * config.head_dim
    layers = tuple(
        LayerWeights(
            attention_norm=norm(),
            qkv=DenseLinear(matrix(projections, hidden)),
            qk_norm=None,
            o=DenseLinear(matrix(hidden, heads)),
            o_bias_E=None,
            mlp_norm=norm(),
            gate_up=DenseLinear(matrix(2 * config.intermediate_size, hidden)),
            down=DenseLinear(matrix(hidden, config.intermediate_size)),
            down_bias_E=None,
        )
        for _ in range(config.num_layers)
    )
    return DecoderWeights(
        embedding=DenseLinear(matrix(config.vocab_size, hidden)),
        lm_head=DenseLinear(matrix(config.vocab_size, hidden)),
        final_norm=norm(),
        layers=layers,
        frequencies_F=inverse_frequencies(config, None).to(device),
    )


class Plain:
    """The same model over a contiguous cache of `batch` sequences, as torch alone would run it."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, batch: int, room: int):
        self._config = config
        self._weights = weights
        like = weights.final_norm.weight
        shape = (config.num_layers, 2, batch, config.num_kv_heads, room, config.head_dim)
        self._cache = torch.randn(shape, device=like.device, dtype=like.dtype)

    def step(self, token_ids_ST: Tensor, start: int) -> Tensor:
        """Logits of each sequence's last token; its new tokens stand from `start` on."""
        config, weights = self._config, self._weights
        num_sequences, num_tokens = token_ids_ST.shape
        stop = start + num_tokens
        x = weights.embedding.rows(token_ids_ST.flatten()).view(num_sequences, num_tokens, -1)
        positions = torch.arange(start, stop, device=x.device)
        cos, sin = (part.to(x.dtype) for part in rotation(positions, weights.frequencies_F))
        cut = [config.num_query_heads, config.num_kv_heads, config.num_kv_heads]
        for layer, cache in zip(weights.layers, self._cache, strict=True):
            h = F.rms_norm(x, x.shape[-1:], layer.attention_norm.weight, 1e-5)
            qkv = self._linear(layer.qkv, h)
            heads = qkv.view(*qkv.shape[:2], -1, config.head_dim).transpose(1, 2)
            q, k, v = torch.split(heads, cut, 1)
            q, k = (y * cos + y.roll(config.head_dim // 2, -1) * sin for y in (q, k))
            cache[0, :, :, start:stop], cache[1, :, :, start:stop] = k, v
            keys, values = cache[:, :, :, :stop]
            causal = num_tokens > 1
            a = F.scaled_dot_product_attention(q, keys, values, is_causal=causal, enable_gqa=True)
            x = x + self._linear(layer.o, a.transpose(1, 2).flatten(2))
            h = F.rms_norm(x, x.shape[-1:], layer.mlp_norm.weight, 1e-5)
            gate, up = self._linear(layer.gate_up, h).chunk(2, -1)
            x = x + self._linear(layer.down, F.silu(gate) * up)
        last = F.rms_norm(x[:, -1], x.shape[-1:], weights.final_norm.weight, 1e-5)
        return self._linear(weights.lm_head, last).float()

    def _linear(self, linear: object, x: Tensor) -> Tensor:
        assert isinstance(linear, DenseLinear)
        return F.linear(x, linear.weight_OI)


def batch_of(
    num_sequences: int, context: int, num_new: int, block_size: int, device: str, num_blocks: int
) -> Batch:
    """The last `num_new` tokens of each sequence, over blocks in random order."""
    width = -(-context // block_size)
    order = torch.randperm(num_blocks)[: num_sequences * width]
    tables = order.view(num_sequences, width)
    new = torch.arange(context - num_new, context)
    slots = tables[:, new // block_size] * block_size + new % block_size
    starts = torch.arange(num_sequences + 1) * num_new
    parts = (
        torch.arange(num_sequences * num_new) % 500,
        new.repeat(num_sequences),
        slots.flatten(),
        starts,
        torch.full((num_sequences,), context),
        tables,
        starts[1:] - 1,
    )
    return Batch(*(part.to(device) for part in parts))


def seconds(action: Callable[[], object], device: str) -> float:
    _wait(device)
    began = time.perf_counter()
    action()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def in_turn(
    ours: Callable[[], object], peer: Callable[[], object], runs: int, device: str
) -> tuple[list[float], list[float]]:
    """Seconds of each, once both are warm."""
    for action in (ours, peer):
        for _ in range(3):
            action()
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(runs):
        for action, times in zip((ours, peer), taken, strict=True):
            times.append(seconds(action, device))
    return taken


def copy_bytes_s(sizes: Sizes, device: str) -> float:
    """Bytes read plus bytes written a second."""
    source = torch.zeros(sizes.copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = [seconds(lambda: target.copy_(source), device) for _ in range(sizes.runs + 3)][3:]
    return 2 * source.nbytes / statistics.median(times)


def product_flop_s(sizes: Sizes, device: str, dtype: torch.dtype) -> float:
    a, b = torch.randn(2, sizes.product, sizes.product, device=device, dtype=dtype)
    times = [seconds(lambda: a @ b, device) for _ in range(sizes.runs + 3)][3:]
    return 2 * sizes.product**3 / statistics.median(times)


def weight_bytes(weights: DecoderWeights) -> int:
    """Read by one decode step."""
    matrices = [weights.lm_head.num_bytes]
    for layer in weights.layers:
        matrices += [each.num_bytes for each in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    return sum(matrices)


def decode_row(
    sizes: Sizes, device: str, weights: DecoderWeights, model: Model, shape: tuple[int, int],
    bytes_s: float,
) -> Row:  # fmt: skip
    config, (num_sequences, context) = sizes.config, shape
    num_blocks = num_sequences * -(-context // sizes.block_size) + 8
    kv_heads = HeadMap.even(config.num_query_heads, config.num_kv_heads, 1).kv[0]
    store = KvStore(model.spec, kv_heads, num_blocks, device)
    batch = batch_of(num_sequences, context, 1, sizes.block_size, device, num_blocks)
    plain = Plain(config, weights, num_sequences, context)
    token_ids = batch.token_ids_T[:, None]

    def compute() -> Tensor:
        return plain.step(token_ids, context - 1)

    peer: Callable[[], object] = compute
    if device == "cuda":
        recorder = CudaRecorder()
        recorder.warm(compute)
        _, peer = recorder.record(compute)
    ours, theirs = in_turn(
        lambda: model.forward(batch, store, lambda layer: None), peer, sizes.runs, device
    )
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * num_sequences * context
    least = (weight_bytes(weights) + kv * weights.final_norm.weight.element_size()) / bytes_s
    what = f"decode, {num_sequences} x {context:,} tokens"
    return rate_row(what, num_sequences, ours, theirs, least)


def prefill_row(
    sizes: Sizes, device: str, weights: DecoderWeights, model: Model, num_tokens: int, flop_s: float
) -> Row:
    config = sizes.config
    num_blocks = -(-num_tokens // sizes.block_size) + 8
    kv_heads = HeadMap.even(config.num_query_heads, config.num_kv_heads, 1).kv[0]
    store = KvStore(model.spec, kv_heads, num_blocks, device)
    batch = batch_of(1, num_tokens, num_tokens, sizes.block_size, device, num_blocks)
    plain = Plain(config, weights, 1, num_tokens)
    token_ids = batch.token_ids_T[None]
    logits = model.forward(batch, store, lambda layer: None)
    assert logits is not None
    alike = F.cosine_similarity(logits, plain.step(token_ids, 0)).min()
    assert alike > 0.99, f"the two compute different things: cosine {alike:.3f}"
    ours, theirs = in_turn(
        lambda: model.forward(batch, store, lambda layer: None),
        lambda: plain.step(token_ids, 0),
        sizes.runs,
        device,
    )
    per_token = sum(
        2 * each.in_width * each.out_width
        for layer in weights.layers
        for each in (layer.qkv, layer.o, layer.gate_up, layer.down)
    )
    width = config.num_query_heads * config.head_dim
    attention = 2 * config.num_layers * width * num_tokens * (num_tokens + 1)
    least = (per_token * num_tokens + attention) / flop_s
    return rate_row(f"prefill, {num_tokens:,} tokens", num_tokens, ours, theirs, least)


def rate_row(
    what: str, num_tokens: int, ours: list[float], theirs: list[float], least: float
) -> Row:
    """Seconds of steps that give so many tokens, and the least there can be, as rates."""
    mine, peers = ([num_tokens / each for each in taken] for taken in (ours, theirs))
    return row(what, mine, [num_tokens / least], PEER, peers, "tokens/s")


def measure(sizes: Sizes, device: str, dtype: torch.dtype) -> list[Row]:
    torch.manual_seed(0)
    config = sizes.config
    weights = random_weights(config, device, dtype)
    head_map = HeadMap.even(config.num_query_heads, config.num_kv_heads, 1)
    name = str(dtype).removeprefix("torch.")
    spec = CacheSpec.full(
        config.num_layers, config.num_kv_heads, config.head_dim, sizes.block_size, name
    )
    decoder = Decoder(config, head_map, SingleComm(), weights, spec)
    model: Model = DecodeGraphs(decoder) if device == "cuda" else decoder
    bytes_s, flop_s = copy_bytes_s(sizes, device), product_flop_s(sizes, device, dtype)
    print(f"copy {bytes_s / 1e9:,.0f} GB/s, matrix product {flop_s / 1e12:,.1f} TFLOP/s")
    with torch.inference_mode():
        rows = [decode_row(sizes, device, weights, model, shape, bytes_s) for shape in sizes.decode]
        return rows + [
            prefill_row(sizes, device, weights, model, tokens, flop_s) for tokens in sizes.prefill
        ]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no CUDA device: nothing was measured", file=sys.stderr)
        return 2
    card = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    sizes = SMALL if options.tiny else FULL
    print(f"{card}: {sizes.config.name}")
    load = os.getloadavg()[0]
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    rows = measure(sizes, options.device, dtype)
    about = {"device": card, "model": sizes.config.name}
    return publish(options.out, rows, Console(), load, about)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
