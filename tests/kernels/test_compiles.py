"""The kernels compile for CUDA devices, which needs none."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton exists on Linux only")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from kernels.copy_blocks import _copy_blocks  # noqa: E402
from kernels.gather_blocks import _gather_cells  # noqa: E402
from kernels.paged_attention import DOT_DTYPES, TILE, _paged_attention  # noqa: E402
from kernels.scatter_blocks import _scatter_cells  # noqa: E402
from kernels.write_kv import _write_kv  # noqa: E402

AMPERE, HOPPER = 80, 90
SHARED_BYTES = {AMPERE: 163 << 10, HOPPER: 227 << 10}  # a program may use at most


def compiled_shared_bytes(
    kernel: object, pointers: dict[str, str], constants: dict[str, object], capability: int
) -> int:
    names = list(kernel.arg_names)  # type: ignore[attr-defined]
    signature = {name: "i32" for name in names} | pointers | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32))
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


@pytest.mark.parametrize(("capability", "queries"), [(AMPERE, 8), (HOPPER, 2)])
def test_attention_compiles_and_fits_shared_memory(capability: int, queries: int) -> None:
    values = {"q": "*bf16", "pool": "*bf16", "out": "*bf16", "scale_log2": "fp32"}
    tables = dict.fromkeys(("query_starts", "context_lens", "block_tables"), "*i64")
    constants: dict[str, object] = {
        "slot_stride": 128,
        "num_slots": 16,
        "head_dim": 128,
        "GROUP": 8,
        "GROUP_ROWS": 8,
        "QUERIES": queries,
        "WIDTH": 128,
        "TILE": TILE,
        "DOT": DOT_DTYPES[torch.bfloat16],
    }
    shared = compiled_shared_bytes(_paged_attention, values | tables, constants, capability)
    assert shared <= SHARED_BYTES[capability]
