"""How long the simulated workers take. Times in milliseconds."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from kvferry.errors import CommandError
from kvferry.replay.trace import Trace

WEIGHT = 0.2  # of the newest prompt in the speed that is reported, if it has so many tokens
FULL_CHUNK = 64
WARM_UP_TOKENS = 128  # of the prompt by which a worker learns its speed before it serves


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
    fetch_call_ms: float = 5.0
    fetch_bytes_per_ms: float = 1_000_000.0

    @property
    def usual_ms_per_token(self) -> float:
        """What a worker that has served nobody yet announces."""
        return self.prefill_ms(WARM_UP_TOKENS, 0) / WARM_UP_TOKENS

    def changed(self, **given: float | None) -> "Speeds":
        """With those that are given. Raises CommandError on what no worker can have."""
        known = {name: value for name, value in given.items() if value is not None}
        for name, value in known.items():
            least = 1e-9 if name.endswith("bytes_per_ms") else 0.0
            if not (math.isfinite(value) and value >= least):
                raise CommandError(f"{name} = {value}: must be a number of at least {least:g}")
        if "token_bytes" in known:
            known["token_bytes"] = int(known["token_bytes"])
        return replace(self, **known)  # type: ignore[arg-type]

    def prefill_ms(self, num_tokens: int, cached_tokens: int) -> float:
        uncached = num_tokens - cached_tokens
        looks = uncached * (cached_tokens + (uncached + 1) / 2)
        return (
            self.prefill_base_ms + self.prefill_ms_per_token * uncached + self.attention_ms * looks
        )

    def fetch_ms(self, num_bytes: float) -> float:
        """Until blocks of so many bytes have come from another worker."""
        return self.fetch_call_ms + num_bytes / self.fetch_bytes_per_ms

    def step_ms(self, num_sequences: int, context_tokens: int) -> float:
        return (
            self.step_base_ms
            + self.step_ms_per_sequence * num_sequences
            + self.step_ms_per_token * context_tokens
        )


@dataclass(slots=True)
class Speedometer:
    """What a worker says of its speed: a moving average, as `engine.load` keeps it."""

    ms_per_token: float

    def learn(self, compute_ms: float, num_tokens: int) -> None:
        """A prompt of which so many tokens were computed in that time."""
        weight = WEIGHT * min(1.0, num_tokens / FULL_CHUNK)
        self.ms_per_token += weight * (compute_ms / num_tokens - self.ms_per_token)


def read_speeds(path: Path) -> Speeds:
    """From JSON: an object of fields, or one that has it under `speeds`. Raises CommandError."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CommandError(f"{path} holds no speeds: {error}") from None
    given = found.get("speeds", found) if isinstance(found, Mapping) else None
    names = [field.name for field in fields(Speeds)]
    if not isinstance(given, Mapping) or not set(given) <= set(names):
        raise CommandError(f"{path} holds no speeds: an object of {', '.join(names)} is wanted")
    wrong = {name: value for name, value in given.items() if not isinstance(value, int | float)}
    for name, value in wrong.items():
        raise CommandError(f"{path}: {name} = {value!r} is no number")
    return Speeds().changed(**given)


def zero_hit_ms(trace: Trace, speeds: Speeds) -> float:
    """What computing every prompt in full would take one worker."""
    lengths: Iterable[int] = (each.num_tokens for each in trace.arrivals)
    return sum(speeds.prefill_ms(length, 0) for length in lengths)


def at_load(trace: Trace, speeds: Speeds, num_replicas: int, load: float) -> Trace:
    """`trace` with its arrivals so far apart that computing all of it takes `load` of the time."""
    natural = zero_hit_ms(trace, speeds) / (num_replicas * 1000 * max(trace.duration_s, 1e-3))
    return trace.stretched(natural / load)
