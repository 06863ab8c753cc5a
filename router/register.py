"""The requests that are open now: how many may be, how one is found again, how all of them end."""

from dataclasses import dataclass

from engine.clock import Clock
from router.errors import Overloaded, Repeated, RequestFailed, Unavailable, Withdrawn, shown
from router.legs import Legs
from router.request import Tenant

POLL_S = 0.02


@dataclass(slots=True, eq=False)
class Ticket:
    """The place of one open request. `legs` are those of its present attempt."""

    tenant: Tenant
    request_id: str
    legs: Legs | None = None
    ended_by: RequestFailed | None = None

    def end(self, failure: RequestFailed) -> None:
        """End the request from outside: its legs now, itself when it next looks."""
        self.ended_by = failure
        if self.legs is not None:
            self.legs.interrupt(failure)

    def check(self) -> None:
        if self.ended_by is not None:
            raise self.ended_by


class Register:
    def __init__(self, max_requests: int, retry_after_s: float, clock: Clock) -> None:
        self._max_requests = max_requests
        self._retry_after_s = retry_after_s
        self._clock = clock
        self._open: dict[tuple[bytes, str], Ticket] = {}  # by tenant and id
        self.draining = False

    @property
    def num_open(self) -> int:
        return len(self._open)

    def admit(self, tenant: Tenant, request_id: str) -> Ticket:
        """Take a place; `leave` gives it back. Raises Repeated where the tenant's request of this
        id still runs, Overloaded, or Unavailable at the end.
        """
        if self.draining:
            raise Unavailable("the router is stopping", retry_after_s=self._retry_after_s)
        if len(self._open) >= self._max_requests:
            raise Overloaded(
                f"{len(self._open)} requests are open, the limit is {self._max_requests}",
                retry_after_s=self._retry_after_s,
            )
        place = (tenant.key, request_id)
        if place in self._open:
            raise Repeated(
                f"request_id: {shown(request_id)} is the id of a request that still runs; wait for"
                " its end, cancel it, or use another id"
            )
        ticket = self._open[place] = Ticket(tenant, request_id)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        del self._open[ticket.tenant.key, ticket.request_id]

    def cancel(self, tenant: Tenant, request_id: str) -> bool:
        """End the tenant's request of this id. A stranger's id is as unknown as no id."""
        ticket = self._open.get((tenant.key, request_id))
        if ticket is not None:
            ticket.end(Withdrawn("the request was cancelled by its id"))
        return ticket is not None

    async def drain(self, grace_s: float) -> None:
        """Admit nobody more, wait for those inside, and end those who take too long."""
        self.draining = True
        until = self._clock.now() + grace_s
        while self._open and self._clock.now() < until:
            await self._clock.sleep(POLL_S)
        for ticket in self._open.values():
            ticket.end(Unavailable("the router is stopping"))
