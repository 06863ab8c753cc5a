"""The requests that are open now: how many may be, how one is found again, how all of them end."""

from dataclasses import dataclass

from engine.clock import Clock
from router.errors import Overloaded, RequestFailed, Unavailable, Withdrawn
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
        self._open: set[Ticket] = set()
        self.draining = False

    @property
    def num_open(self) -> int:
        return len(self._open)

    def admit(self, tenant: Tenant, request_id: str) -> Ticket:
        """Take a place; `leave` gives it back. Raises Overloaded, or Unavailable at the end."""
        if self.draining:
            raise Unavailable("the router is stopping", retry_after_s=self._retry_after_s)
        if len(self._open) >= self._max_requests:
            raise Overloaded(
                f"{len(self._open)} requests are open, the limit is {self._max_requests}",
                retry_after_s=self._retry_after_s,
            )
        ticket = Ticket(tenant, request_id)
        self._open.add(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        self._open.remove(ticket)

    def cancel(self, tenant: Tenant, request_id: str) -> bool:
        """End the tenant's requests of this id. A stranger's id is as unknown as no id."""
        found = [
            each
            for each in self._open
            if each.request_id == request_id and each.tenant.key == tenant.key
        ]
        for ticket in found:
            ticket.end(Withdrawn("the request was cancelled by its id"))
        return bool(found)

    async def drain(self, grace_s: float) -> None:
        """Admit nobody more, wait for those inside, and end those who take too long."""
        self.draining = True
        until = self._clock.now() + grace_s
        while self._open and self._clock.now() < until:
            await self._clock.sleep(POLL_S)
        for ticket in self._open:
            ticket.end(Unavailable("the router is stopping"))
