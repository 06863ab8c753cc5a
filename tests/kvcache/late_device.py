"""A device that does nothing before it must: who does not wait sees what was there before."""

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvcache.streams import Event, Stream, Work


@dataclass(slots=True)
class LateEvent:
    stream: "LateStream"
    number: int  # of pieces of work before it

    def synchronize(self) -> None:
        with self.stream.device.lock:
            self.stream.device.log.append(f"host waits for {self.stream.name} {self.number}")
            self.stream.do(self.number)


@dataclass(slots=True)
class LateStream:
    device: "LateDevice"
    name: str
    _work: list[Work] = field(default_factory=list)
    num_done: int = 0

    def run(self, work: Work) -> None:
        with self.device.lock:
            self._work.append(work)
            self.device.log.append(f"{self.name} {len(self._work)}")

    def record(self) -> LateEvent:
        return LateEvent(self, len(self._work))

    def wait(self, event: Event) -> None:
        assert isinstance(event, LateEvent)
        with self.device.lock:
            self.device.log.append(f"{self.name} waits for {event.stream.name} {event.number}")
            self._work.append(lambda: event.stream.do(event.number))

    def do(self, number: int) -> None:
        while self.num_done < number:
            self.num_done += 1
            self._work[self.num_done - 1]()

    @property
    def num_left(self) -> int:
        return len(self._work) - self.num_done


class LateDevice:
    """For any number of threads; `steps` is the stream that every thread calls its current one."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.log: list[str] = []
        self.steps = LateStream(self, "steps")
        self.sides: list[LateStream] = []

    def current(self) -> Stream:
        return self.steps

    def side(self) -> Stream:
        with self.lock:
            self.sides.append(LateStream(self, f"side{len(self.sides)}"))
            return self.sides[-1]

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 0xAB, dtype=torch.uint8)

    def finish(self) -> None:
        for stream in (self.steps, *self.sides):
            stream.do(stream.num_left + stream.num_done)
