"""One life of one worker, as this router knows it, and what this router has booked on it."""

from dataclasses import dataclass, field
from typing import Protocol

import grpc
import grpc.aio

from prefix_index.index import WorkerRecord


class Loses(Protocol):
    """Something that stands or falls with a worker's life."""

    def lose(self, reason: str) -> None: ...


@dataclass(slots=True, eq=False)
class Worker:
    """`unfit` says why it can never serve our model; empty when it can."""

    record: WorkerRecord
    channel: grpc.aio.Channel
    unfit: str
    booked_tokens: int = 0  # ours, on their way or waiting there: to be computed, as we think
    booked_prompts: int = 0  # the tokens of those prompts in full, as the worker counts them
    booked_requests: int = 0
    foreign_tokens: int = 0  # what it reported beyond ours: other routers' work
    legs: set[Loses] = field(default_factory=set)
    # The most prompt tokens booked at once, since the last report and between it and the last but
    # one: what a report counts has been booked at some time in these two spans, so whatever it
    # says beyond is foreign, however old it is when it arrives here.
    _peaks: tuple[int, int] = (0, 0)

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def standing(self) -> str:
        """Why it can take no request at all now; empty when it can."""
        return self.unfit or ("is draining" if self.record.load.draining else "")

    @property
    def connected(self) -> bool:
        """False once the peer has closed or refused the connection, as a dead process does."""
        return self.channel.get_state() is grpc.ChannelConnectivity.READY

    def renew(self, record: WorkerRecord) -> None:
        if record.load != self.record.load:
            self.foreign_tokens = max(0, record.load.queued_tokens - max(self._peaks))
            self._peaks = (self._peaks[1], self.booked_prompts)
        self.record = record

    def book(self, tokens: int, prompt_tokens: int) -> None:
        self.booked_tokens += tokens
        self.booked_prompts += prompt_tokens
        self._peaks = (self._peaks[0], max(self._peaks[1], self.booked_prompts))


@dataclass(slots=True, eq=False)
class Booking:
    """What one attempt adds to its workers' queues until it returns it."""

    computing: Worker
    streaming: Worker
    tokens: int
    prompt_tokens: int

    def computed(self) -> None:
        """The prompt is computed; safe to say twice."""
        self.computing.book(-self.tokens, -self.prompt_tokens)
        self.tokens = self.prompt_tokens = 0

    def close(self) -> None:
        self.computed()
        self.streaming.booked_requests -= 1
