"""What a replay is asked to do."""

from dataclasses import dataclass, field
from math import inf, isfinite

from kvferry.errors import CommandError
from kvferry.replay.rivals import Policy
from kvferry.replay.speeds import Speeds

INDEX = "redis"


@dataclass(frozen=True, slots=True)
class Fault:
    """At `at_s` a worker dies, or the index is lost; `down_s` later, if at all, its next life
    begins, empty.
    """

    at_s: float
    worker: str  # prefill-3, decode-0, or INDEX
    down_s: float | None


@dataclass(frozen=True, slots=True)
class Options:
    policy: Policy = Policy.OURS
    num_replicas: int = 8
    cache_tokens: int = 1_000_000  # of each
    load: float | None = 0.8  # of what computing everything would take; None: as recorded
    num_decodes: int = 2
    num_routers: int = 1  # requests go to each in turn
    decode_tokens: int = 8_000_000  # of each
    decode_cache: bool = True  # what decode holds stays there as cache
    fetches: bool = True  # blocks from who holds them, instead of computing: our policy alone does
    line: bool = False  # whether requests wait at the router and are refused: ours alone does that
    index_lag_s: float = 0.0
    faults: tuple[Fault, ...] = ()
    seed: int = 0
    speeds: Speeds = field(default_factory=Speeds)

    @property
    def prefills(self) -> list[str]:
        return [f"prefill-{number}" for number in range(self.num_replicas)]

    @property
    def decodes(self) -> list[str]:
        return [f"decode-{number}" for number in range(self.num_decodes)]

    def check(self) -> None:
        """Raise CommandError where a fault is nobody's, or a number is none."""
        for name, value in (("--load", self.load), ("--index-lag", self.index_lag_s)):
            if value is not None and not isfinite(value):
                raise CommandError(f"{name} {value}: must be a finite number")
        known = [*self.prefills, *self.decodes, INDEX]
        for fault in self.faults:
            if fault.worker not in known:
                raise CommandError(
                    f"there is no {fault.worker} that could fail; there are {', '.join(known)}"
                )


def parse_fault(text: str) -> Fault:
    """`kill:WORKER@SECONDS` or `restart:WORKER@SECONDS+SECONDS`, where a number is a prefill
    replica's. Raises CommandError.
    """
    kind, _, rest = text.partition(":")
    worker, _, times = rest.partition("@")
    at_s, plus, down_s = times.partition("+")
    try:
        if worker and ((kind, plus) == ("kill", "") or (kind, plus) == ("restart", "+")):
            named = f"prefill-{worker}" if worker.isdecimal() else worker
            fault = Fault(float(at_s), named, float(down_s) if plus else None)
            if 0 <= fault.at_s < inf and (fault.down_s is None or 0 < fault.down_s < inf):
                return fault
    except ValueError:
        pass
    raise CommandError(
        f"{text} is no fault: kill:WORKER@SECONDS or restart:WORKER@SECONDS+SECONDS, where a worker"
        f" is prefill-0 (or 0), decode-0, or {INDEX}, and no time is negative"
    )
