"""How long the simulated workers take. Times in milliseconds."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.replay.trace import Trace


@dataclass(frozen=True, slots=True)
class Speeds:
    """The defaults are about those of an 8B model on one accelerator of 2024."""

    prefill_base_ms: float = 0.0
    prefill_ms_per_token: float = 0.1
    attention_ms: float = 0.0  # for each pair of a computed token and one it looks at
    step_base_ms: float = 12.0
    step_ms_per_sequence: float = 0.05
    step_ms_per_token: float = 2e-5  # of context, over the whole batch
    token_bytes: int = 131_072
    link_bytes_per_ms: float = 10_000_000.0

    def prefill_ms(self, num_tokens: int, cached_tokens: int) -> float:
        uncached = num_tokens - cached_tokens
        looks = uncached * (cached_tokens + (uncached + 1) / 2)
        return (
            self.prefill_base_ms + self.prefill_ms_per_token * uncached + self.attention_ms * looks
        )

    def step_ms(self, num_sequences: int, context_tokens: int) -> float:
        return (
            self.step_base_ms
            + self.step_ms_per_sequence * num_sequences
            + self.step_ms_per_token * context_tokens
        )


def zero_hit_ms(trace: Trace, speeds: Speeds) -> float:
    """What computing every prompt in full would take one worker."""
    lengths: Iterable[int] = (each.num_tokens for each in trace.arrivals)
    return sum(speeds.prefill_ms(length, 0) for length in lengths)


def at_load(trace: Trace, speeds: Speeds, num_replicas: int, load: float) -> Trace:
    """`trace` with its arrivals so far apart that computing all of it takes `load` of the time."""
    natural = zero_hit_ms(trace, speeds) / (num_replicas * 1000 * max(trace.duration_s, 1e-3))
    return trace.stretched(natural / load)
