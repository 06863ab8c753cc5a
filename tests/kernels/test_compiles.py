"""The kernels compile for CUDA devices, which needs none."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton exists on Linux only")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from kernels.copy_blocks import _copy_blocks  # noqa: E402
from kernels.gather_blocks import _gather_cells  # noqa: E402
from kernels.paged_attention import (  # noqa: E402
    DOT_DTYPES,
    SPLIT,
    TILE,
    _join_splits,
    _paged_attention,
    max_width,
)
from kernels.quantise_kv import _read_kv_quantised, _write_kv_quantised  # noqa: E402
from kernels.rms_norm import _rms_norm  # noqa: E402
from kernels.rotate_write import _rotate_write  # noqa: E402
from kernels.sample_tokens import _sample_tokens  # noqa: E402
from kernels.scatter_blocks import _scatter_cells  # noqa: E402
from kernels.silu_multiply import _silu_multiply  # noqa: E402
from kernels.write_kv import _write_kv  # noqa: E402

AMPERE, HOPPER = 80, 90
SHARED_BYTES = {AMPERE: 163 << 10, HOPPER: 227 << 10}  # a program may use at most


def compiled_shared_bytes(
    kernel: object,
    pointers: dict[str, str],
    constants: dict[str, object],
    capability: int,
    options: dict[str, int] | None = None,
) -> int:
    names = list(kernel.arg_names)  # type: ignore[attr-defined]
    signature = {name: "i32" for name in names} | pointers | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert built.asm["cubin"]
    return int(built.metadata.shared)


@pytest.mark.parametrize(
    ("kernel", "pointers"),
    [
        (_gather_cells, {"pool": "*bf16", "block_ids": "*i64", "cells": "*bf16"}),
        (_scatter_cells, {"cells": "*bf16", "pool": "*bf16", "block_ids": "*i64"}),
        (_copy_blocks, {"pool": "*bf16", "src": "*i64", "dst": "*i64"}),
        (_write_kv, {"pool": "*bf16", "k": "*bf16", "v": "*bf16", "slots": "*i64"}),
    ],
)
def test_the_copying_kernels_compile(kernel: object, pointers: dict[str, str]) -> None:
    constants: dict[str, object] = {"WIDTH": 64} if kernel is _write_kv else {"CHUNK": 1024}
    if kernel in (_gather_cells, _scatter_cells):
        constants |= {"slot_stride": 512, "head_dim": 64}
    compiled_shared_bytes(kernel, pointers, constants, HOPPER)


LAYER_KERNELS = [
    (_rms_norm, {"WIDTH": 4096, "SUMMED": True}),
    (_silu_multiply, {"CHUNK": 1024}),
    (_rotate_write, {"WIDTH": 128}),
    (_write_kv_quantised, {"WHOLE": False, "WIDTH": 128}),
    (_read_kv_quantised, {"CHUNK": 1024}),
    (_join_splits, {"WIDTH": 128, "SPLIT": SPLIT}),
    (_sample_tokens, {"SORTS": True, "CHUNK": 4096}),
    (_sample_tokens, {"SORTS": False, "CHUNK": 4096}),
]
FLOATS = ("x", "residual", "weights", "out", "gate_up", "q", "k", "v", "cos", "sin", "kv")
TYPES = {
    **dict.fromkeys(FLOATS, "*bf16"),
    **dict.fromkeys(("scales", "parts", "tops", "totals"), "*fp32"),
    **dict.fromkeys(("slots", "block_ids", "query_starts", "context_lens"), "*i64"),
    **dict.fromkeys(("eps", "most", "tiny", "scale_log2"), "fp32"),
    "pool": "*bf16",
    "block_tables": "*i64",
    "logits": "*fp32",
    **dict.fromkeys(("temperatures", "min_ps", "top_ps", "noises"), "*fp64"),
    **dict.fromkeys(("top_ks", "tokens"), "*i64"),
}


@pytest.mark.parametrize(("kernel", "constants"), LAYER_KERNELS, ids=lambda value: str(value)[:40])
def test_the_kernels_of_a_layer_compile(kernel: object, constants: dict[str, object]) -> None:
    pool = "*fp8e4nv" if kernel in (_write_kv_quantised, _read_kv_quantised) else "*bf16"
    types = {name: kind for name, kind in TYPES.items() if name in kernel.arg_names}  # type: ignore[attr-defined]
    if "pool" in types:
        types["pool"] = pool
    if kernel is _sample_tokens:
        types["weights"] = "*fp64"
    compiled_shared_bytes(kernel, types, constants, HOPPER)


@pytest.mark.parametrize(
    ("capability", "queries", "split", "windowed", "stored", "head_dim"),
    [
        (AMPERE, 8, 0, False, "*bf16", 128),
        (AMPERE, 8, 0, False, "*bf16", max_width(torch.bfloat16)),
        (AMPERE, 8, 0, True, "*i8", 128),
        (HOPPER, 2, SPLIT, False, "*bf16", 128),
        (HOPPER, 2, SPLIT, True, "*fp8e4nv", 128),
    ],
)
def test_attention_compiles_and_fits_shared_memory(
    capability: int, queries: int, split: int, windowed: bool, stored: str, head_dim: int
) -> None:
    types = {name: kind for name, kind in TYPES.items() if name in _paged_attention.arg_names}
    constants: dict[str, object] = {
        "slot_stride": head_dim,
        "num_slots": 16,
        "head_dim": head_dim,
        "GROUP": 8,
        "GROUP_ROWS": 8,
        "QUERIES": queries,
        "WIDTH": head_dim,
        "TILE": TILE,
        "SPLIT": split,
        "WINDOWED": windowed,
        "QUANTISED": stored != "*bf16",
        "DOT": DOT_DTYPES[torch.bfloat16],
    }
    types["pool"] = stored
    options = {"num_warps": 4 if split else 8, "num_stages": 2}
    shared = compiled_shared_bytes(_paged_attention, types, constants, capability, options)
    assert shared <= SHARED_BYTES[capability]
