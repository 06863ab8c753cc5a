"""Work queued on a device, and the events by which one stream of it waits for another.

`CudaDevice` is the real one. Another stands in its place where the order of events is tested.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Work = Callable[[], object]


class Event(Protocol):
    """A point in a stream: all that was queued before it."""

    def synchronize(self) -> None:
        """Hold this thread until the point is reached."""
        ...


class Stream(Protocol):
    """Its work is done in order, sometime later."""

    def run(self, work: Work) -> None:
        """Queue what `work` asks of the device; `work` itself is called now or later, once."""
        ...

    def record(self) -> Event: ...

    def wait(self, event: Event) -> None:
        """What is queued from now on begins after `event`; this thread goes on."""
        ...


class Device(Protocol):
    def current(self) -> Stream:
        """Where the calling thread's work goes that names no stream."""
        ...

    def side(self) -> Stream:
        """A new one."""
        ...

    def pinned(self, num_bytes: int) -> Tensor:
        """Memory of the host, uint8, that the device copies from and to by itself."""
        ...


@dataclass(frozen=True, slots=True)
class CudaStream:
    stream: torch.cuda.Stream

    def run(self, work: Work) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def record(self) -> Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        self.stream.wait_event(event)


@dataclass(frozen=True, slots=True)
class CudaDevice:
    device: torch.device

    def current(self) -> Stream:
        return CudaStream(torch.cuda.current_stream(self.device))

    def side(self) -> Stream:
        # Before what a step has queued: its kernels fill the card, and cells are few and awaited.
        stream = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        return CudaStream(stream)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
