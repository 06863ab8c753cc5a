"""What a service promises of its times, and which share of the requests kept it."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Protocol

from kvferry.errors import CommandError


class Timed(Protocol):
    """A request that was served."""

    @property
    def ttft_ms(self) -> float: ...

    @property
    def tpot_ms(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Targets:
    """Milliseconds to the first token and for each further one, kept by a share of the requests."""

    ttft_ms: float
    tpot_ms: float
    share: float = 0.99

    @staticmethod
    def of(ttft_s: float | None, per_token_s: float | None) -> "Targets | None":
        """None where neither is given. Raises CommandError."""
        if ttft_s is None and per_token_s is None:
            return None
        given = (inf if each is None else 1000 * each for each in (ttft_s, per_token_s))
        targets = Targets(*given)
        targets.check()
        return targets

    def check(self) -> None:
        """Raise CommandError on what nobody could keep."""
        for name, value in (("--ttft", self.ttft_ms), ("--per-token", self.tpot_ms)):
            if not value > 0:
                raise CommandError(f"{name} {value / 1000:g}: must be above 0 seconds")
        if not 0 < self.share <= 1:
            raise CommandError(f"--share {self.share:g}: must be above 0 and at most 1")

    def attained(self, served: Iterable[Timed], num_requests: int) -> float:
        """The share of all requests that kept both; who was not served kept none."""
        num_kept = sum(self.kept(each.ttft_ms, each.tpot_ms) for each in served)
        return num_kept / num_requests if num_requests else 0.0

    def kept(self, ttft_ms: float, tpot_ms: float) -> bool:
        return ttft_ms <= self.ttft_ms and tpot_ms <= self.tpot_ms
