"""Matrices in a form that the compiled decoder multiplies by.

T rows, I inputs, O outputs
"""

from typing import Protocol, runtime_checkable

from torch import Tensor

from kernels.host_decoder import HostDecoder, Matrix, Team
from model.linear import Linear


@runtime_checkable
class HostLinear(Linear, Protocol):
    """What it describes stays where it is as long as the linear lives."""

    @property
    def matrix(self) -> Matrix: ...


class PanelLinear:
    """fp32 values, laid out once so that they are read in the order in which they are used."""

    def __init__(
        self,
        kernel: HostDecoder,
        team: Team,
        weight_OI: Tensor,
        bias_O: Tensor | None = None,
        paired: bool = False,
    ) -> None:
        self.out_width, self.in_width = weight_OI.shape
        self.num_bytes = weight_OI.nbytes + (0 if bias_O is None else bias_O.nbytes)
        self.matrix, self._memory = kernel.lay_out(weight_OI, bias_O, paired=paired)
        self._kernel = kernel
        self._team = team

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._team.multiply(self.matrix, x_TI)

    def rows(self, numbers_T: Tensor) -> Tensor:
        return self._kernel.rows(self.matrix, numbers_T)
