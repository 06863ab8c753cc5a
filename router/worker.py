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
    booked_tokens: int = 0  # ours, on their way or waiting there
    booked_requests: int = 0
    foreign_tokens: int = 0  # what it reported beyond ours: other routers' work
    legs: set[Loses] = field(default_factory=set)

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
            self.foreign_tokens = max(0, record.load.queued_tokens - self.booked_tokens)
        self.record = record


@dataclass(slots=True, eq=False)
class Booking:
    """What one attempt adds to its workers' queues until it returns it."""

    computing: Worker
    streaming: Worker
    tokens: int

    def computed(self) -> None:
        """The prompt is computed; safe to say twice."""
        self.computing.booked_tokens -= self.tokens
        self.tokens = 0

    def close(self) -> None:
        self.computed()
        self.streaming.booked_requests -= 1
