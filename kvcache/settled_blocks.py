"""Which blocks of a shown pool are known to lie in huge pages, where others read them quickly."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvcache.shared_memory import SharedMemory


class SettledBlocks:
    """Of the `num_blocks` blocks of a pool, whose live `layers` lie in `shared`."""

    def __init__(self, shared: SharedMemory, layers: Mapping[int, Tensor], num_blocks: int) -> None:
        self._shared = shared
        self._layers = layers
        self._settled_NL = np.zeros((num_blocks, len(layers)), np.bool_)

    def hold(self, layer: int, ids_B: NDArray[np.int64]) -> bool:
        """Whether `settle` has nothing left to do for these."""
        return bool(self._settled_NL[ids_B, layer].all())

    def settle(self, layer: int, ids_B: NDArray[np.int64]) -> None:
        """Have these lie there."""
        if self.hold(layer, ids_B):
            return
        pool_NPHSD = self._layers[layer]
        block, plane, *_ = (stride * pool_NPHSD.itemsize for stride in pool_NPHSD.stride())
        begin = pool_NPHSD.data_ptr() - self._shared.array.ctypes.data
        planes_P = begin + plane * np.arange(pool_NPHSD.shape[1])
        self._shared.settle((planes_P[:, None] + block * ids_B).reshape(-1))
        self._settled_NL[ids_B, layer] = True
