"""Whose turn it is among tenants: a fair queue in virtual time, by tokens.

Every tenant has a tag: where its next request would begin in virtual time. What it is served moves
its tag by tokens over weight, and virtual time moves to where the served request began. So a tenant
that has had less comes first; one that had nothing for long begins at the present and has saved
nothing up; and one that was alone owes nobody for that. (Start-time fair queueing: Goyal, Vin and
Cheng, SIGCOMM 1996; tokens as the measure of service, output added when it is known: Sheng et al.,
Fairness in Serving Large Language Models, OSDI 2024.)
"""

from collections.abc import Mapping

MAX_TENANTS = 10_000  # remembered; beyond, those who are behind virtual time go first


class Shares:
    """`weights` are of those who do not have the usual 1."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._tags: dict[str, float] = {}
        self._now = 0.0  # virtual

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def start(self, tenant: str) -> float:
        """Where the tenant's next request begins; the least is next."""
        return max(self._now, self._tags.get(tenant, 0.0))

    def serve(self, tenant: str, tokens: float) -> None:
        """A request of the tenant is let through, that costs so much as far as is known."""
        self._now = self.start(tenant)
        self._tags[tenant] = self._now + tokens / self.weight(tenant)
        if len(self._tags) > MAX_TENANTS:
            self._tags = {each: tag for each, tag in self._tags.items() if tag > self._now}

    def add(self, tenant: str, tokens: float) -> None:
        """One that was let through has cost so much more."""
        self._tags[tenant] = self.start(tenant) + tokens / self.weight(tenant)
