"""Requests that wait at the router, because every worker has more ahead of it than its bar.

    joined    it has a place; places are bounded, and so is the time in them
    first     it is its tenant's turn, and its own among the tenant's: it asks the policy again and
              again, until a worker is under its bar
    left      it is served, refused, or its client is gone
    pushed    the line is full, its tenant has the most places in it, and another tenant comes

Tenants take turns by their shares, so that none waits for what another one floods the line with.
Within a tenant the lower number of priority goes first, then who came first: a priority takes
nothing from others.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from engine.clock import Clock
from router.errors import Overloaded
from router.shares import Shares


@dataclass(slots=True, eq=False)
class Place:
    """One waiting request. `compute_ms` and `tokens` are what serving it will cost."""

    tenant: str
    priority: int
    number: int
    tokens: float
    compute_ms: float
    joined_at: float
    first: asyncio.Event = field(default_factory=asyncio.Event)
    pushed: bool = False

    @property
    def rank(self) -> tuple[int, int]:
        return self.priority, self.number


class Line:
    def __init__(
        self,
        clock: Clock,
        max_waiting: int = 128,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self._clock = clock
        self._max_waiting = max_waiting
        self.shares = Shares(weights)
        self._places: dict[str, list[Place]] = {}  # by tenant, in order
        self._num_joined = 0

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    def tenants(self) -> Mapping[str, int]:
        """How many requests of whom are waiting."""
        return {tenant: len(places) for tenant, places in self._places.items()}

    def ahead_ms(self, tenant: str, priority: int, tokens: float, place: Place | None) -> float:
        """Work of those who will be served before such a request, or before who has this place.

        Its own tenant's in full; of each other tenant as much as its share lets pass meanwhile.
        """
        rank = place.rank if place else (priority, self._num_joined + 1)
        own = [each for each in self._places.get(tenant, ()) if each.rank < rank]
        start, weight = self.shares.start(tenant), self.shares.weight(tenant)
        until = start + (sum(each.tokens for each in own)) / weight
        ahead_ms = sum(each.compute_ms for each in own)
        for other, places in self._places.items():
            if other != tenant:
                ahead_ms += self._passing_ms(other, places, until)
        return ahead_ms

    def _passing_ms(self, tenant: str, places: Iterable[Place], until: float) -> float:
        """Work of the tenant's whose turn comes before virtual time `until`."""
        at, weight, passing_ms = self.shares.start(tenant), self.shares.weight(tenant), 0.0
        for each in places:
            if at > until:
                break
            at += each.tokens / weight
            passing_ms += each.compute_ms
        return passing_ms

    def why_full(self, tenant: str) -> str:
        """Why a request of the tenant gets no place; empty when it gets one."""
        if len(self) < self._max_waiting or self._crowding(tenant) is not None:
            return ""
        return f"{len(self)} requests are waiting at the router, the limit is {self._max_waiting}"

    def join(self, tenant: str, priority: int, tokens: float, compute_ms: float) -> Place:
        """Take a place; `leave` gives it back. Raises Overloaded."""
        if full := self.why_full(tenant):
            raise Overloaded(full)
        if len(self) >= self._max_waiting:
            crowding = self._crowding(tenant)
            assert crowding is not None
            self._push_out(self._places[crowding][-1])
        self._num_joined += 1
        now = self._clock.now()
        place = Place(tenant, priority, self._num_joined, tokens, compute_ms, now)
        places = self._places.setdefault(tenant, [])
        places.append(place)
        places.sort(key=lambda each: each.rank)
        self._tell_first()
        return place

    def leave(self, place: Place) -> None:
        """Safe to say twice."""
        places = self._places.get(place.tenant, [])
        if place in places:
            places.remove(place)
            if not places:
                del self._places[place.tenant]
            self._tell_first()

    def is_first(self, place: Place) -> bool:
        return self._first() is place

    async def turn(self, place: Place, timeout_s: float) -> None:
        """Until the place may be first, it is pushed out, or some time has passed."""
        if not place.pushed and not self.is_first(place):
            place.first.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await place.first.wait()
        except TimeoutError:
            pass

    def check(self) -> None:
        """Raise AssertionError unless every place was given back."""
        assert not self._places, f"places left in the line: {dict(self.tenants())}"

    def _first(self) -> Place | None:
        if not self._places:
            return None
        heads = [places[0] for places in self._places.values()]
        return min(heads, key=lambda each: (self.shares.start(each.tenant), each.number))

    def _tell_first(self) -> None:
        first = self._first()
        for places in self._places.values():
            for each in places:
                if each is first:
                    each.first.set()
                else:
                    each.first.clear()

    def _crowding(self, tenant: str) -> str | None:
        """Who has so many more places, by its weight, that it may lose one to the tenant."""

        def share(each: str, more: int = 0) -> float:
            return (len(self._places.get(each, ())) + more) / self.shares.weight(each)

        most = max(self._places, key=share, default=tenant)
        return most if share(most) > share(tenant, 1) and most != tenant else None

    def _push_out(self, place: Place) -> None:
        place.pushed = True
        self.leave(place)
        place.first.set()
