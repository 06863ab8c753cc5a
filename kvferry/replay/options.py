"""What a replay is asked to do."""

from dataclasses import dataclass, field

from kvferry.errors import CommandError
from kvferry.replay.rivals import Policy
from kvferry.replay.speeds import Speeds


@dataclass(frozen=True, slots=True)
class Fault:
    """At `at_s` a prefill replica dies; its next life, empty, begins `down_s` later, if at all."""

    at_s: float
    replica: int
    down_s: float | None


@dataclass(frozen=True, slots=True)
class Options:
    policy: Policy = Policy.OURS
    num_replicas: int = 8
    cache_tokens: int = 1_000_000  # of each
    load: float | None = 0.8  # of what computing everything would take; None: as recorded
    num_decodes: int = 2
    decode_tokens: int = 8_000_000  # of each
    index_lag_s: float = 0.0
    faults: tuple[Fault, ...] = ()
    seed: int = 0
    speeds: Speeds = field(default_factory=Speeds)


def parse_fault(text: str) -> Fault:
    """`kill:REPLICA@SECONDS` or `restart:REPLICA@SECONDS+SECONDS`. Raises CommandError."""
    kind, _, rest = text.partition(":")
    replica, _, times = rest.partition("@")
    at_s, plus, down_s = times.partition("+")
    try:
        if (kind, plus) == ("kill", "") or (kind, plus) == ("restart", "+"):
            return Fault(float(at_s), int(replica), float(down_s) if plus else None)
    except ValueError:
        pass
    raise CommandError(f"{text} is no fault: kill:REPLICA@SECONDS, restart:REPLICA@SECONDS+SECONDS")
