"""One direction of a link: what enters now comes out when, if at all.

    offer   ->  cut or lost by chance            never comes out
            ->  the queue before the line full   never comes out (drop tail)
            ->  waits for the line, takes its own time on it, then the delay

The lane keeps no packets, only the moment at which its line will be free: whoever uses it keeps
what is under way, and says what time it is. The same seed and calls give the same answers.
"""

import random
from dataclasses import dataclass

from kvferry.lab.topology import Shape

MIN_QUEUE_S = 0.05  # what `tc tbf latency 50ms` holds, and enough for TCP to fill the line


@dataclass(slots=True)
class Counts:
    num_carried: int = 0
    num_bytes: int = 0
    num_lost: int = 0  # cut, or by chance
    num_dropped: int = 0  # the queue was full


class Lane:
    """`burst_s`: an idle line may catch up on so much, for a user who looks only now and then."""

    def __init__(self, shape: Shape, seed: int = 0, burst_s: float = 0.0) -> None:
        self.shape = shape
        self._burst_s = burst_s
        self.is_cut = False
        self.counts = Counts()
        self._random = random.Random(seed)
        self._line_free_at = 0.0
        self._last_arrival = 0.0

    @property
    def max_queue_s(self) -> float:
        """The time on the line of as much as may wait for it."""
        return max(MIN_QUEUE_S, 2 * self.shape.delay_s)

    def queued_s(self, now: float) -> float:
        """How long what enters now would wait for the line."""
        return max(0.0, self._line_free_at - now)

    def offer(self, now: float, num_bytes: int) -> float | None:
        """When a packet that enters now comes out, or None when it never does."""
        if self.is_cut or (self.shape.loss and self._random.random() < self.shape.loss):
            self.counts.num_lost += 1
            return None
        if self.queued_s(now) > self.max_queue_s:
            self.counts.num_dropped += 1
            return None
        return self._carry(now, num_bytes)

    def stream(self, now: float, num_bytes: int, packet_bytes: int) -> float:
        """When bytes of a stream that enter now come out, in order and all of them.

        A lost packet costs what TCP's fast retransmission costs: one more round trip, for this
        piece and all behind it.
        """
        packets = -(-num_bytes // packet_bytes)
        arrival = self._carry(now, num_bytes)
        if self.shape.loss and self._random.random() < 1 - (1 - self.shape.loss) ** packets:
            self.counts.num_lost += 1
            arrival += max(2 * self.shape.delay_s, 0.001)
            self._last_arrival = arrival
        return arrival

    def _carry(self, now: float, num_bytes: int) -> float:
        self.counts.num_carried += 1
        self.counts.num_bytes += num_bytes
        rate = self.shape.rate_bits_per_s
        on_line_s = num_bytes * 8 / rate if rate else 0.0
        self._line_free_at = max(now - self._burst_s, self._line_free_at) + on_line_s
        # Never ahead of what is under way, even when the delay has just been made shorter.
        leaves_line_at = max(now, self._line_free_at)
        self._last_arrival = max(self._last_arrival, leaves_line_at + self.shape.delay_s)
        return self._last_arrival
