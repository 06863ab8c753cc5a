"""A step of a decoder on a CPU, in fp32, by threads that go through it together.

`decoder.c` and the sources beside it are compiled at first use for the very processor. Calls hold
no interpreter lock. Where there is no compiler, `load` answers None, and the model computes with
torch, which is also the reference: `model.decoder` for a step, `torch.nn.functional.linear` for a
product, `kernels.paged_attention` for attention.

    T rows, I inputs, O outputs
"""

import ctypes
import functools
from enum import IntFlag
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.compiled import NATIVE, Signatures, loaded
from kernels.huge_pages import Memory
from kernels.paged_attention import EVERYTHING, Sight

SOURCE = Path(__file__).with_name("decoder.c")
BESIDE = [SOURCE.with_name(name) for name in ("attention.c", "dense.c", "team.c")]
MAX_HEAD_DIM = 256  # of attention.c

_address, _count, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES: Signatures = {
    "team_made": (_address, [ctypes.c_int]),
    "team_ended": (None, [_address]),
    "dense_floats": (_count, [_count, _count, _count]),
    "dense_lay_out": (None, [_address, _count, _count, _count, _count, _address]),
    "dense_matrix": (None, [_address, _address, _count, _count, _count, _count, _address]),
    "attention_scratch": (_count, [_address, ctypes.c_int]),
    "decoder_scratch": (_count, [_address, _address, ctypes.c_int]),
    "decoder_product_scratch": (_count, [_address, _count]),
    "decoder_multiply": (
        None,
        [_address, _address, _address, _count, _count, _address, _address],
    ),
    "decoder_rows": (None, [_address, _address, _count, _address]),
    "decoder_attend": (None, [_address, _address]),
    "decoder_run": (None, [_address, _address, _address, _count, _count, _count]),
}


class Part(IntFlag):
    """Of a step; see decoder.c."""

    BEGIN = 1
    WRITE = 2
    ATTEND = 4
    FEED = 8
    FINISH = 16
    PROJECT = 32


PARTS = (
    *("outside", "embed", "norm", "qkv", "write K and V"),
    *("attention", "o", "gate and up", "down", "head"),
)  # of team.h, in which a timed team counts


class Matrix(ctypes.Structure):
    """See matrix.h."""

    _fields_ = [
        ("in_width", _count),
        ("out_width", _count),
        ("values", _address),
        ("bias", _address),
        ("paired", _count),
        ("num_items", _address),
        ("multiply", _address),
        ("row", _address),
        ("scratch_bytes", _address),
        ("prepare", _address),
    ]


class Layer(ctypes.Structure):
    """See decoder.c, as for those below."""

    _fields_ = [
        ("attention_norm", _address),
        ("mlp_norm", _address),
        ("qk_norm", _address),
        ("o_bias", _address),
        ("down_bias", _address),
        ("qkv", ctypes.POINTER(Matrix)),
        ("o", ctypes.POINTER(Matrix)),
        ("gate_up", ctypes.POINTER(Matrix)),
        ("down", ctypes.POINTER(Matrix)),
        ("window", _count),
    ]


class Decoder(ctypes.Structure):
    _fields_ = [
        ("width", _count),
        ("middle", _count),
        ("head_dim", _count),
        ("num_query_heads", _count),
        ("num_kv_heads", _count),
        ("num_layers", _count),
        ("eps", _float),
        ("scale", _float),
        ("frequencies", _address),
        ("layers", ctypes.POINTER(Layer)),
        ("embedding", ctypes.POINTER(Matrix)),
        ("lm_head", ctypes.POINTER(Matrix)),
        ("final_norm", _address),
    ]


class Attention(ctypes.Structure):
    """See attention.h."""

    _fields_ = [
        ("q", _address),
        ("out", _address),
        ("q_stride", _count),
        ("out_stride", _count),
        ("num_query_heads", _count),
        ("num_kv_heads", _count),
        ("head_dim", _count),
        ("scale", _float),
        ("window", _count),
        ("sinks", _count),
        ("pool", _address),
        ("block_stride", _count),
        ("plane_stride", _count),
        ("head_stride", _count),
        ("slot_stride", _count),
        ("num_slots", _count),
        ("num_sequences", _count),
        ("first_query", _address),
        ("num_queries", _address),
        ("first_out", _address),
        ("contexts", _address),
        ("tables", _address),
        ("table_stride", _count),
        ("scratch", _address),
    ]

    def read_from(self, pool_NPHSD: Tensor) -> None:
        """Where the pool lies, and how."""
        assert pool_NPHSD.dtype == torch.float32 and pool_NPHSD.stride(4) == 1
        self.pool = pool_NPHSD.data_ptr()
        strides = pool_NPHSD.stride()
        self.block_stride, self.plane_stride, self.head_stride, self.slot_stride = strides[:4]
        self.num_kv_heads, self.num_slots, self.head_dim = pool_NPHSD.shape[2:]


class Step(ctypes.Structure):
    _fields_ = [
        ("num_rows", _count),
        ("num_sequences", _count),
        ("token_ids", _address),
        ("positions", _address),
        ("slots", _address),
        ("about", Attention),
        ("num_wanted", _count),
        ("wanted", _address),
        ("only_last", _count),
        ("x", _address),
        ("sum", _address),
        ("h", _address),
        ("qkv", _address),
        ("attended", _address),
        ("inner", _address),
        ("angles", _address),
        ("kept", _address),
        ("logits", _address),
        ("scratch", _address),
        ("pools", _address),
        ("bias", _address),
        ("pending", _count),
    ]


class HostDecoder(NamedTuple):
    """The compiled functions."""

    library: ctypes.CDLL

    def team(self, size: int) -> "Team":
        return Team(self.library, size)

    def lay_out(
        self,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        *,
        paired: bool,
        narrow: bool = False,
        memory: Memory | None = None,
    ) -> tuple[Matrix, list[Tensor]]:
        """A matrix of fp32 weights, rounded to bf16 if narrow, and what must outlive it, out of
        `memory` where others of the model lie, too.
        """
        memory = memory or Memory(0)
        num_outputs, width = weight_OI.shape
        weight_OI = weight_OI.contiguous()
        num_floats = self.library.dense_floats(width, num_outputs, narrow)
        panels = memory.empty(num_floats, dtype=torch.float32)
        self.library.dense_lay_out(
            weight_OI.data_ptr(), width, num_outputs, paired, narrow, panels.data_ptr()
        )
        kept, bias = [panels], None
        if bias_O is not None:
            laid_out = torch.empty(self.library.dense_floats(1, num_outputs, False))
            self.library.dense_lay_out(
                bias_O.contiguous().data_ptr(), 1, num_outputs, paired, False, laid_out.data_ptr()
            )
            kept.append(laid_out)
            bias = laid_out.data_ptr()
        matrix = Matrix()
        self.library.dense_matrix(
            ctypes.byref(matrix), panels.data_ptr(), width, num_outputs, paired, narrow, bias
        )
        return matrix, kept

    def rows(self, matrix: Matrix, numbers_T: Tensor) -> Tensor:
        """Rows of the matrix itself, [T, I]."""
        numbers_T = numbers_T.contiguous()
        out_TI = torch.empty(len(numbers_T), matrix.in_width)
        self.library.decoder_rows(
            ctypes.byref(matrix), numbers_T.data_ptr(), len(numbers_T), out_TI.data_ptr()
        )
        return out_TI


class Team:
    """Threads, the caller's one of them. Not for several callers at once."""

    def __init__(self, library: ctypes.CDLL, size: int) -> None:
        self._library = library
        self.size = size
        self._team = library.team_made(size)
        if not self._team:
            raise OSError(f"cannot start {size - 1} threads")

    def multiply(self, matrix: Matrix, x_TI: Tensor, *, gated: bool = False) -> Tensor:
        """out_TO = x W^T + b; gated: silu of its first half times its second."""
        assert x_TI.dtype == torch.float32 and x_TI.shape[1] == matrix.in_width
        x_TI = x_TI.contiguous()
        width = matrix.out_width // 2 if gated else matrix.out_width
        out_TO = torch.empty(len(x_TI), width)
        scratch = torch.empty(
            self._library.decoder_product_scratch(ctypes.byref(matrix), len(x_TI)),
            dtype=torch.uint8,
        )
        self._library.decoder_multiply(
            self._team, ctypes.byref(matrix), x_TI.data_ptr(), len(x_TI), gated,
            out_TO.data_ptr(), scratch.data_ptr(),
        )  # fmt: skip
        return out_TO

    def attention(
        self,
        q_THD: Tensor,
        pool_NPHSD: Tensor,
        query_starts_S1: Tensor,
        context_lens_S: Tensor,
        block_tables_SB: Tensor,
        scale: float,
        sight: Sight = EVERYTHING,
    ) -> Tensor:
        """As `kernels.paged_attention`, over a pool of fp32."""
        q_THD, tables_SB = q_THD.contiguous(), block_tables_SB.contiguous()
        num_queries_S = query_starts_S1.diff()
        out_THD = torch.empty_like(q_THD)
        at = Attention(
            q=q_THD.data_ptr(),
            out=out_THD.data_ptr(),
            q_stride=q_THD.stride(0),
            out_stride=q_THD.stride(0),
            num_query_heads=q_THD.shape[1],
            scale=scale,
            window=sight.window,
            sinks=sight.sinks,
            num_sequences=len(context_lens_S),
            first_query=query_starts_S1.data_ptr(),
            num_queries=num_queries_S.data_ptr(),
            first_out=query_starts_S1.data_ptr(),
            contexts=context_lens_S.data_ptr(),
            tables=tables_SB.data_ptr(),
            table_stride=tables_SB.stride(0),
        )
        at.read_from(pool_NPHSD)
        scratch = torch.empty(self._library.attention_scratch(ctypes.byref(at), self.size))
        at.scratch = scratch.data_ptr()
        self._library.decoder_attend(self._team, ctypes.byref(at))
        return out_THD

    def run(self, decoder: Decoder, step: Step, layer: int, parts: int, times: int = 1) -> None:
        """These parts of a layer, and of as many that follow it."""
        self._library.decoder_run(
            self._team, ctypes.byref(decoder), ctypes.byref(step), layer, parts, times
        )

    def scratch_bytes(self, decoder: Decoder, step: Step) -> int:
        needed: int = self._library.decoder_scratch(
            ctypes.byref(decoder), ctypes.byref(step), self.size
        )
        return needed

    def times(self) -> Tensor:
        """Of a timed library: ns [members, PARTS, computing and waiting] since last asked."""
        times = torch.empty(self.size, len(PARTS), 2, dtype=torch.int64)
        self._library.team_times(self._team, times.data_ptr())
        return times

    def __del__(self) -> None:
        if getattr(self, "_team", None):
            self._library.team_ended(self._team)


@functools.cache
def load(*, timed: bool = False) -> HostDecoder | None:
    """The compiled functions, or None, said once in the log, where they cannot be had. Teams of a
    timed library count what `Team.times` tells.
    """
    count = {"team_times": (None, [_address, _address])}
    return loaded(
        SOURCE,
        *(NATIVE, "-ffp-contract=fast", "-fno-math-errno", "-pthread", "-lm"),
        *(("-DTIMED",) if timed else ()),
        signatures={**SIGNATURES, **count} if timed else SIGNATURES,
        make=HostDecoder,
        otherwise="the decoder is computed by torch, slower",
        beside=BESIDE,
        needs_linux=True,
    )
