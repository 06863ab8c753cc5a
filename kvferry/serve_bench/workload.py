"""A trace as requests: prompts whose blocks are equal exactly where the trace says so.

A block's tokens are drawn from its name, which stands for the block and everything before it, and
from the run's seed: one seed gives the same prompts in every process, and another one prompts that
share nothing with them. What follows a prompt's last full block is drawn from its own number.
"""

from dataclasses import dataclass
from hashlib import shake_128

import numpy as np

from kvferry.replay.trace import Arrival, Trace

WORD_BYTES = 4  # drawn for each token: the remainder's bias is below 2**-15 for any vocabulary


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, ready to be sent."""

    number: int
    at_s: float  # when it is due, after the start
    prompt: list[int]
    max_tokens: int
    tenant: str = ""
    session: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """Tokens are drawn from the first `vocabulary` ids."""

    trace: Trace
    vocabulary: int
    seed: int = 0

    def __len__(self) -> int:
        return len(self.trace.arrivals)

    def ask(self, number: int) -> Ask:
        arrival = self.trace.arrivals[number]
        return Ask(
            number,
            arrival.at_s,
            self.prompt(number, arrival),
            max(1, arrival.output_tokens),
            arrival.tenant,
            arrival.session,
            arrival.priority,
        )

    def prompt(self, number: int, arrival: Arrival) -> list[int]:
        size = self.trace.block_tokens
        names = arrival.names
        tokens = [token for name in names for token in self._drawn("block", name, size)]
        tail = arrival.num_tokens - len(tokens)
        return tokens + self._drawn("tail", number.to_bytes(8, "little"), tail)

    def warm_up(self, count: int) -> list[Ask]:
        """Prompts of the trace's usual length that share nothing with it or with one another."""
        lengths = sorted(each.num_tokens for each in self.trace.arrivals)
        usual = lengths[len(lengths) // 2]
        return [
            Ask(-1 - at, 0.0, self._drawn("warm-up", at.to_bytes(8, "little"), usual), 8)
            for at in range(count)
        ]

    def _drawn(self, what: str, name: bytes, count: int) -> list[int]:
        seed = f"{self.seed} {what} ".encode()
        words = shake_128(seed + name).digest(WORD_BYTES * count)
        drawn: list[int] = (np.frombuffer(words, "<u4") % self.vocabulary).tolist()
        return drawn
