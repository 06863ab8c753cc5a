"""The router's own entrance in a replay: who waits in its line, how long, and who is refused."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from engine.clock import Clock
from engine.sampling_params import SamplingParams
from kvcache.block_hash import BlockHash, Namespace, tenant_key
from kvferry.replay.trace import Arrival
from router.callers import EVERYONE
from router.entrance import Bounds, Entrance, Entrant, Judged
from router.fleet import Fleet
from router.line import Line
from router.metrics import Metrics
from router.register import Ticket
from router.request import AcceptedRequest, Tenant
from router.ways import Weights

MAX_TOKENS = 1 << 16  # that a client asks for: the router does not know how long an answer gets


@dataclass(frozen=True, slots=True)
class _Request(AcceptedRequest):
    """Of a trace there are the names of a prompt's blocks and its length, and no tokens."""

    key: bytes = b""

    def digest(self) -> bytes:
        return self.key


def _tenant(name: str) -> Tenant:
    return Tenant(name, tenant_key(name)) if name else EVERYONE


class Gate:
    """Belongs to one event loop."""

    def __init__(self, fleet: Fleet, clock: Clock, bounds: Bounds, weights: Weights) -> None:
        self._line = Line(clock)
        self._entrance = Entrance(fleet, self._line, Metrics("replay"), clock, bounds, weights)
        self._bounds = bounds
        self._clock = clock
        self._entrants: dict[int, Entrant] = {}

    async def let_in(
        self, number: int, arrival: Arrival, num_tokens: int, names: Sequence[BlockHash], key: bytes
    ) -> Judged:
        """When it is its turn. Raises RequestFailed for who is refused."""
        request = _Request(
            request_id=str(number),
            model="replay",
            prompt=cast(tuple[int, ...], range(num_tokens)),
            params=SamplingParams(max_tokens=MAX_TOKENS),
            tenant=_tenant(arrival.tenant),
            priority=arrival.priority,
            session=arrival.session,
            key=key,
        )
        ticket = Ticket(request.tenant, request.request_id)
        now, seconds = self._clock.now(), self._bounds.request_timeout_s

        def named(_namespace: Namespace, _block_size: int) -> Sequence[BlockHash]:
            return names

        entrant = replace(Entrant.of(request, ticket, now, seconds), names=named)
        judged = await self._entrance.first_choice(entrant)
        self._entrants[number] = entrant
        return judged

    def ended(self, number: int, output_tokens: int, prefill: str, decode: str) -> None:
        """It was served there; what its answer took is charged to its tenant, too."""
        entrant = self._entrants.pop(number, None)
        if entrant is not None:
            self._entrance.ended(entrant, output_tokens)
            self._entrance.went_to(entrant, prefill, decode)

    def check(self) -> None:
        self._line.check()
