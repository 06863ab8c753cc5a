"""Blocks of a prompt that another worker holds, taken from there before the prompt is queued.

    awaited    somebody is taking the same blocks already: this prompt waits for those, and takes
               none itself if they come short
    reserved   the prompt's first blocks are promised and bound, as for a transfer
    taken      each rank asks the holder for its heads, verifies them and writes them
    kept       what is whole on every rank is cached here, under its names; the rest is let go

Then the prompt is queued and finds in the cache what has come; what has not is computed. So nothing
that fails here fails a prompt, and it costs no more time than it was given.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog

from engine.clock import Clock
from engine.engine import Engine
from engine.request import Output, Refused, Request
from engine.roster import Reservation
from kvcache.block_hash import BlockHash
from kvcache.block_pool import OutOfBlocks
from kvcache.ledger import Ledger
from prefill_worker.ranks import ShipsPrompts
from protos import worker_pb2 as pb
from transport import books
from transport.borrower import Borrowed, BorrowOrder
from transport.orders import Holder, Identity, ShipmentKey
from worker.cleanups import Cleanups

MOST_S = 30.0  # whatever the router says

log = structlog.get_logger()


@dataclass(slots=True)
class Fetched:
    """Of one prompt. `num_tokens` follow the `had_tokens` that were here before."""

    had_tokens: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    ms: float = 0.0
    why: str = ""  # it is less than was asked for

    def counted(self, cached_tokens: int) -> int:
        """Of the tokens that the prompt found in the cache, those that came for it."""
        return max(0, min(self.num_tokens, cached_tokens - self.had_tokens))


class Borrowing:
    """Rank 0's. Blocks that ranks may still write to are never let go: if a rank does not answer,
    its group is lost, and they stay.
    """

    def __init__(
        self,
        engine: Engine,
        identity: Identity,
        block_size: int,
        ranks: Sequence[ShipsPrompts],
        cleanups: Cleanups,
        clock: Clock,
        ledger: Ledger,
    ) -> None:
        self._engine = engine
        self._identity = identity
        self._block_size = block_size
        self._ranks = ranks
        self._cleanups = cleanups
        self._clock = clock
        self._ledger = ledger
        # By the last name that is being taken; done with why it is less than was asked for.
        self._coming: dict[BlockHash, asyncio.Future[str]] = {}

    async def fetch(self, request: Request, call: pb.PrefillRequest) -> Fetched:
        """Raises AioRpcError when a rank of this worker is lost."""
        fetched, began = Fetched(), self._clock.now()
        fetched.why = await self._await_others(request)
        if call.HasField("fetch") and not fetched.why:
            names = request.names[: self._wanted(request, call.fetch)]
            here = self._engine.match(names)
            fetched.had_tokens = here * self._block_size
            if here < len(names):
                self._coming[names[-1]] = asyncio.get_running_loop().create_future()
                taking = self._take(request, names, call, fetched)
                await self._cleanups.run(taking, f"fetch for {request.request_id}")
        if fetched.why:
            log.warning("fetch_short", request=request.request_id, reason=fetched.why)
        if call.HasField("fetch"):
            fetched.ms = 1000 * (self._clock.now() - began)
        return fetched

    async def _await_others(self, request: Request) -> str:
        """Why they got less than they asked for, if so: whoever waited for them does not try again,
        or prompts that begin alike would wait for one dead holder in turn.
        """
        while coming := [self._coming[name] for name in request.names if name in self._coming]:
            if why := await asyncio.shield(coming[0]):
                return f"as for another prompt: {why}"
        return ""

    def _wanted(self, request: Request, fetch: pb.Fetch) -> int:
        """Blocks; the prompt's last token is always computed."""
        return max(0, min(fetch.num_blocks, (len(request.prompt) - 1) // self._block_size))

    async def _take(
        self,
        request: Request,
        names: Sequence[BlockHash],
        call: pb.PrefillRequest,
        fetched: Fetched,
    ) -> None:
        reservation: Reservation | None = None
        num_whole = 0
        try:
            reservation = self._engine.reserve(_prefix(request, names, self._block_size))
            self._engine.bind(reservation)
            first = reservation.num_cached_blocks
            fetched.had_tokens = first * self._block_size
            num_whole = first
            order = self._order(call, names[first:], reservation.block_table[first:])
            if order.names:
                took = await asyncio.gather(*(rank.borrow(order) for rank in self._ranks))
                num_whole += min(each.num_whole for each in took)
                self._note(fetched, took, num_whole - first)
                self._enter(order, num_whole - first)
            self._engine.abandon(reservation, num_whole)
        except (OutOfBlocks, Refused) as error:  # no room for a copy now
            fetched.why = str(error)
            if reservation is not None:
                self._engine.abandon(reservation)
        finally:
            self._coming.pop(names[-1]).set_result(fetched.why)

    def _note(self, fetched: Fetched, took: Sequence[Borrowed], num_blocks: int) -> None:
        fetched.num_tokens = num_blocks * self._block_size
        fetched.num_bytes = sum(each.num_bytes for each in took)
        fetched.why = "; ".join(dict.fromkeys(each.why for each in took if each.why))

    def _enter(self, order: BorrowOrder, num_blocks: int) -> None:
        """Into the ledger: every rank has come to its end, and so many blocks are kept."""
        for rank in range(1, len(self._ranks)):
            books.confirmed(self._ledger, order.key, rank)
        books.kept(self._ledger, order.key, order.block_ids[:num_blocks])

    def _order(
        self, call: pb.PrefillRequest, names: Sequence[BlockHash], block_ids: Sequence[int]
    ) -> BorrowOrder:
        return BorrowOrder(
            key=ShipmentKey(call.transfer_id, call.attempt, self._identity.epoch, 0),
            names=tuple(map(bytes, names)),
            block_ids=tuple(block_ids),
            holder=Holder.from_proto(call.fetch.holder),
            timeout_s=min(MOST_S, call.fetch.timeout_ms / 1000),
        )


def _prefix(request: Request, names: Sequence[BlockHash], block_size: int) -> Request:
    """A prompt of the blocks alone, which nobody computes."""
    return Request(
        request_id=f"{request.request_id}.fetch",
        request_key=request.request_key,
        prompt=request.prompt[: len(names) * block_size],
        params=replace(request.params, max_tokens=1, min_tokens=0, n=1, stop=()),
        on_output=_ignored,
        tenant=request.tenant,
        names=list(names),
    )


def _ignored(output: Output) -> None:
    """It is never run."""
