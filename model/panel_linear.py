"""Matrices in a form that the compiled decoder multiplies by.

T rows, I inputs, O outputs
"""

from typing import Protocol, runtime_checkable

from torch import Tensor

from kernels.host_decoder import HostDecoder, Matrix, Team
from kernels.huge_pages import Memory
from model.linear import Linear


@runtime_checkable
class HostLinear(Linear, Protocol):
    """What it describes stays where it is as long as the linear lives."""

    @property
    def matrix(self) -> Matrix: ...


class PanelLinear:
    """fp32 values, or these rounded to bf16 if narrow, laid out once so that they are read in the
    order in which they are used. Products are those of fp32.
    """

    def __init__(
        self,
        kernel: HostDecoder,
        team: Team,
        weight_OI: Tensor,
        bias_O: Tensor | None = None,
        paired: bool = False,
        *,
        narrow: bool = False,
        memory: Memory | None = None,
    ) -> None:
        """`memory` holds it, and others of the model."""
        self.out_width, self.in_width = weight_OI.shape
        num_bytes = weight_OI.nbytes // 2 if narrow else weight_OI.nbytes
        self.num_bytes = num_bytes + (0 if bias_O is None else bias_O.nbytes)
        self.matrix, self._memory = kernel.lay_out(
            weight_OI, bias_O, paired=paired, narrow=narrow, memory=memory
        )
        self._kernel = kernel
        self._team = team

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._team.multiply(self.matrix, x_TI)

    def rows(self, numbers_T: Tensor) -> Tensor:
        return self._kernel.rows(self.matrix, numbers_T)
