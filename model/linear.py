"""A weight matrix that knows how to multiply rows by itself, in whatever form it is kept.

T rows, I inputs, O outputs
"""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from kernels.host_decoder import Matrix
from kernels.packed_linear import PackedKernel, PackedMatrix, load, reference, reference_rows

FEWEST_TURNED = 4  # rows: see `DenseLinear`
MOST_TURNED = 48


class Linear(Protocol):
    """x W^T + b. The form of W is the implementation's own; rows come and go in one dtype."""

    @property
    def in_width(self) -> int: ...

    @property
    def out_width(self) -> int: ...

    @property
    def num_bytes(self) -> int:
        """What it takes of memory, and what one product with few rows reads of it."""
        ...

    def __call__(self, x_TI: Tensor) -> Tensor:
        """out_TO, in memory of its own. A row's result comes of that row alone."""
        ...

    def rows(self, numbers_T: Tensor) -> Tensor:
        """Rows of the matrix itself, [T, I], as an embedding is looked up; the bias is left out."""
        ...


class DenseLinear:
    """The values themselves, multiplied by torch; the product turned round where MKL is faster so.

    Measured on 2 cores of an AMD EPYC (AVX2), fp32, all matrices of SmolLM2-135M: 1 to 3 rows
    23 to 27 ms as they are, 24 to 47 turned; 4 rows 56 and 47, 8 rows 69 and 48, 16 rows 115 and
    48; from 64 rows on as they are is faster. On one core the two are within 10 % of each other.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self.weight_OI = weight_OI
        self.bias_O = bias_O
        self.out_width, self.in_width = weight_OI.shape

    @property
    def num_bytes(self) -> int:
        return self.weight_OI.nbytes + (0 if self.bias_O is None else self.bias_O.nbytes)

    def __call__(self, x_TI: Tensor) -> Tensor:
        if x_TI.is_cuda or not FEWEST_TURNED <= len(x_TI) <= MOST_TURNED:
            return F.linear(x_TI, self.weight_OI, self.bias_O)
        out_TO = (self.weight_OI @ x_TI.t()).t().contiguous()
        return out_TO if self.bias_O is None else out_TO.add_(self.bias_O)

    def rows(self, numbers_T: Tensor) -> Tensor:
        return self.weight_OI[numbers_T]


class PackedLinear:
    """A few bits a weight, multiplied as they lie; see `kernels.packed_linear` for how exactly.

    On a CPU, in fp32 whatever the rows are.
    """

    matrix: Matrix  # where it could be compiled

    def __init__(
        self,
        packed: PackedMatrix,
        bias_O: Tensor | None = None,
        kernel: PackedKernel | None = None,  # by default the machine's best
    ) -> None:
        self.packed = packed
        self.bias_O = None if bias_O is None else bias_O.float()
        self.in_width, self.out_width = packed.width, packed.num_outputs
        self.num_bytes = packed.num_bytes + (0 if self.bias_O is None else self.bias_O.nbytes)
        kernel = kernel or load()
        self._compiled = None if kernel is None else (kernel, kernel.describe(packed))
        if kernel is not None and self._compiled is not None:
            self.matrix = kernel.matrix(self._compiled[1], self.bias_O)

    def __call__(self, x_TI: Tensor) -> Tensor:
        rows_TI = x_TI.float().contiguous()
        if self._compiled is None:
            out_TO = reference(self.packed, rows_TI, self.bias_O)
        else:
            kernel, described = self._compiled
            out_TO = kernel.multiply(described, rows_TI, self.bias_O)
        return out_TO.to(x_TI.dtype)

    def rows(self, numbers_T: Tensor) -> Tensor:
        if self._compiled is None:
            return reference_rows(self.packed, numbers_T)
        kernel, described = self._compiled
        return kernel.rows(described, numbers_T)
