"""Whom not to ask for a while: a worker that failed, or a pair that failed with no one to blame."""

from dataclasses import dataclass

from engine.clock import Clock

LONGEST_S = 60.0

Party = str | tuple[str, str]  # an instance, or a (prefill, decode) pair of instances


@dataclass(frozen=True, slots=True)
class _Doubt:
    since: float
    until: float
    reason: str
    num_failures: int  # in a row


class Doubts:
    """A doubt lasts `first_s`, and twice as long after each further failure, until one success."""

    def __init__(self, clock: Clock, first_s: float) -> None:
        self._clock = clock
        self._first_s = first_s
        self._doubts: dict[Party, _Doubt] = {}

    def add(self, party: Party, reason: str) -> None:
        now = self._clock.now()
        before = self._doubts.get(party)
        failures = 1 + (before.num_failures if before else 0)
        pause_s = min(self._first_s * 2.0 ** (failures - 1), LONGEST_S)
        self._doubts[party] = _Doubt(now, now + pause_s, reason, failures)

    def clear(self, *parties: Party) -> None:
        """A call over these went well."""
        for party in parties:
            self._doubts.pop(party, None)

    def forget(self, instance: str) -> None:
        """This life is over, and with it what was held against it."""
        for party in [each for each in self._doubts if instance == each or instance in each[:2]]:
            del self._doubts[party]

    def reasons(self) -> dict[Party, str]:
        """Everyone who is left out now, and why."""
        now = self._clock.now()
        return {
            party: f"failed {now - doubt.since:.1f} s ago: {doubt.reason}"
            for party, doubt in self._doubts.items()
            if now < doubt.until
        }
