"""Cells between a device's pool and the host, on side streams, past the step that is computing.

    fence     of a layer: its KV is written as far as steps have asked for; of a step: its kernels
              read and write no block any more
    lane      a side stream and two pinned buffers, lent to one call at a time
    piece     as many blocks as a buffer holds: while one is copied by the device, the host empties
              or fills the other
    gather    begins behind the layer's fence, scatter behind the last step's: what a block held
              before it was given back is then past. Either returns when the device is done, so
              whoever called may send the cells, count them in place, or give the blocks back

The reference is the way of `cell_reader` and `cell_writer` by torch.
"""

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.gather_blocks import gather_cells
from kernels.scatter_blocks import scatter_cells
from kvcache.streams import Device, Event, Stream

PIECE_BYTES = 1 << 20  # a bus of 25 GB/s takes 40 us for it, several times a launch


class Span(NamedTuple):
    """A piece of a transfer: some of its blocks, of some consecutive local heads."""

    blocks: slice
    columns: slice  # of the heads that are asked for
    heads: tuple[int, int]


@dataclass(slots=True)
class Buffer:
    """Pinned memory, and what the device does with it."""

    bytes: Tensor
    block_ids: Tensor  # pinned, too
    span: Span | None = None
    done: Event | None = None

    def finish(self) -> Span | None:
        """Waits until the device has no more to do with it; the span it was used for."""
        span, done = self.span, self.done
        self.span = self.done = None
        if done is not None:
            done.synchronize()
        return span


@dataclass(slots=True)
class Lane:
    stream: Stream
    buffers: deque[Buffer] = field(default_factory=deque)


class DeviceCells:
    """For any number of threads."""

    def __init__(self, device: Device, piece_bytes: int = PIECE_BYTES) -> None:
        self._device = device
        self._piece_bytes = piece_bytes
        self._idle: list[Lane] = []
        self._written: dict[int, Event] = {}
        self._ended: Event | None = None

    def layer_written(self, layers: Sequence[int]) -> None:
        """On the thread that computes: what is queued there so far writes these layers."""
        event = self._device.current().record()
        for layer in layers:
            self._written[layer] = event

    def step_ended(self) -> None:
        """On the thread that computes, before any block that its step used can be given back."""
        self._ended = self._device.current().record()

    def gather(
        self,
        layer: int,
        pool_NPHSD: Tensor,
        block_ids: Sequence[int],
        runs: Sequence[tuple[int, int]],
        parts: int,
        cells_BHPC: NDArray[np.uint8],
    ) -> None:
        """Into `cells_BHPC`, the heads of all `runs` side by side."""
        with self._lane(cells_BHPC) as lane:
            self._begin(lane, self._written.get(layer))
            for span in self._spans(runs, cells_BHPC):
                buffer = _next(lane)
                _empty(buffer, cells_BHPC)
                ids_B = _ids(buffer, block_ids[span.blocks])
                lane.stream.run(_Gather(pool_NPHSD, ids_B, span.heads, parts, buffer.bytes))
                buffer.span, buffer.done = span, lane.stream.record()
            for _ in range(len(lane.buffers)):
                _empty(_next(lane), cells_BHPC)

    def scatter(
        self,
        pool_NPHSD: Tensor,
        block_ids: Sequence[int],
        runs: Sequence[tuple[int, int]],
        parts: int,
        cells_BHPC: NDArray[np.uint8],
    ) -> None:
        """The other way."""
        with self._lane(cells_BHPC) as lane:
            self._begin(lane, self._ended)
            for span in self._spans(runs, cells_BHPC):
                buffer = _next(lane)
                buffer.finish()
                ids_B = _ids(buffer, block_ids[span.blocks])
                cells = cells_BHPC[span.blocks, span.columns]
                into = buffer.bytes[: cells.size]
                into.numpy().reshape(cells.shape)[:] = cells
                lane.stream.run(
                    _Scatter(pool_NPHSD, ids_B, span.heads[0], parts, into, cells.shape)
                )
                buffer.span, buffer.done = span, lane.stream.record()

    @contextlib.contextmanager
    def _lane(self, cells_BHPC: NDArray[np.uint8]) -> Iterator[Lane]:
        """Left only when the device has done all that was queued on it."""
        try:
            lane = self._idle.pop()
        except IndexError:
            lane = Lane(self._device.side())
        try:
            self._make_room(lane, cells_BHPC)
            yield lane
        finally:
            for buffer in lane.buffers:
                buffer.finish()
            self._idle.append(lane)

    def _make_room(self, lane: Lane, cells_BHPC: NDArray[np.uint8]) -> None:
        """Buffers for a piece at least, and for one block of all its heads."""
        block_bytes = cells_BHPC[:1].nbytes
        num_bytes = max(self._piece_bytes, block_bytes)
        num_ids = max(1, len(cells_BHPC))
        if not lane.buffers or lane.buffers[0].bytes.nbytes < num_bytes:
            lane.buffers = deque(self._buffer(num_bytes, num_ids) for _ in range(2))
        elif len(lane.buffers[0].block_ids) < num_ids:
            for buffer in lane.buffers:
                buffer.block_ids = self._device.pinned(8 * num_ids).view(torch.int64)

    def _buffer(self, num_bytes: int, num_ids: int) -> Buffer:
        ids = self._device.pinned(8 * num_ids).view(torch.int64)
        return Buffer(self._device.pinned(num_bytes), ids)

    def _begin(self, lane: Lane, fence: Event | None) -> None:
        if fence is not None:
            lane.stream.wait(fence)

    def _spans(
        self, runs: Sequence[tuple[int, int]], cells_BHPC: NDArray[np.uint8]
    ) -> Iterator[Span]:
        num_blocks, _, num_planes, cell_bytes = cells_BHPC.shape
        taken = 0
        for lo, hi in runs:
            columns = slice(taken, taken + hi - lo)
            taken += hi - lo
            step = max(1, self._piece_bytes // ((hi - lo) * num_planes * cell_bytes))
            for first in range(0, num_blocks, step):
                yield Span(slice(first, min(num_blocks, first + step)), columns, (lo, hi))


@dataclass(frozen=True, slots=True)
class _Gather:
    pool_NPHSD: Tensor
    block_ids_B: Tensor
    heads: tuple[int, int]
    parts: int
    into: Tensor

    def __call__(self) -> None:
        ids_B = self.block_ids_B.to(self.pool_NPHSD.device, non_blocking=True)
        cells = gather_cells(self.pool_NPHSD, ids_B, self.heads, self.parts)
        flat = cells.view(-1).view(torch.uint8)
        self.into[: len(flat)].copy_(flat, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Scatter:
    pool_NPHSD: Tensor
    block_ids_B: Tensor
    lo: int
    parts: int
    cells: Tensor
    shape_BHPC: Sequence[int]

    def __call__(self) -> None:
        pool_NPHSD = self.pool_NPHSD
        ids_B = self.block_ids_B.to(pool_NPHSD.device, non_blocking=True)
        shape = (*self.shape_BHPC[:3], -1, pool_NPHSD.shape[4])
        cells_BHPSD = self.cells.view(pool_NPHSD.dtype).view(shape)
        cells_BHPSD = cells_BHPSD.to(pool_NPHSD.device, non_blocking=True)
        scatter_cells(cells_BHPSD, pool_NPHSD, ids_B, self.lo, self.parts)


def _next(lane: Lane) -> Buffer:
    lane.buffers.rotate(-1)
    return lane.buffers[-1]


def _empty(buffer: Buffer, cells_BHPC: NDArray[np.uint8]) -> None:
    """Take what the device has brought."""
    span = buffer.finish()
    if span is not None:
        cells = cells_BHPC[span.blocks, span.columns]
        cells[:] = buffer.bytes[: cells.size].numpy().reshape(cells.shape)


def _ids(buffer: Buffer, block_ids: Sequence[int]) -> Tensor:
    ids_B = buffer.block_ids[: len(block_ids)]
    ids_B.numpy()[:] = block_ids
    return ids_B
