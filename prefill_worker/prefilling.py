"""One prompt's life on a prefill worker.

    open       every rank knows where its share of the blocks goes; decode may not be ready yet
    fetched    what another worker holds of it is taken from there, if the router says so
    admitted   the engine has taken all the prompt's blocks; cached ones are being shipped already
    computing  chunk by chunk, layer by layer; what is sealed is shipped
    sampled    the first token of each choice leaves for the router at once, and for decode with
               the shipment's end
    done       decode has committed on all its ranks, or nothing was left to decode
    released   the blocks stay cached here, named, for the next prompt that begins like this one

However it ends, one place lets go: the shipments first, on every rank, and only then the blocks. If
a rank does not answer they stay: it may be reading, and its group is lost in any case.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from engine.engine import Engine
from engine.request import Admitted, Request, TokenOutput
from prefill_worker.borrowing import Borrowing, Fetched
from prefill_worker.ranks import ShipsPrompts
from protos import worker_pb2 as pb
from transport.orders import (
    Code,
    Identity,
    ShipmentKey,
    ShipmentOrder,
    ShipmentReport,
    Target,
    TransferFailed,
)
from transport.shipper import Shipper
from worker.cleanups import Cleanups
from worker.outputs import Outputs
from worker.refusal import refusals
from worker.work import WorkIntake

PrefillEvents = AsyncGenerator[pb.PrefillEvent, None]


@dataclass(slots=True)
class _Prompt:
    """One call's own state: what must be let go, and how far it got."""

    request: Request
    key: ShipmentKey
    outputs: Outputs
    first_tokens: list[TokenOutput] = field(default_factory=list)
    fetched: Fetched = field(default_factory=Fetched)
    ends: str = "cancelled"  # why its shipments end, if they have to be aborted
    committed: bool = False


class Prefilling:
    """Runs prompts on rank 0's engine and drives the shipments of all ranks."""

    def __init__(
        self,
        engine: Engine,
        intake: WorkIntake,
        identity: Identity,
        shipper: Shipper,
        ranks: Sequence[ShipsPrompts],
        cleanups: Cleanups,
        borrowing: Borrowing,
    ) -> None:
        self._engine = engine
        self._intake = intake
        self._identity = identity
        self._shipper = shipper  # rank 0's own: it carries the first tokens
        self._ranks = ranks
        self._cleanups = cleanups
        self._borrowing = borrowing

    async def run(self, call: pb.PrefillRequest) -> PrefillEvents:
        """Yield the events of one call; raises Refused. Close it, and everything is let go."""
        outputs = Outputs(asyncio.get_running_loop())
        request = self._intake.accept(
            call.work, outputs.put, hold=True, max_chunk_tokens=call.max_chunk_tokens
        )
        order = _order(call, request, self._identity)
        prompt = _Prompt(request, order.key, outputs)
        try:
            with refusals():
                await asyncio.gather(*(rank.open(order) for rank in self._ranks))
                prompt.fetched = await self._borrowing.fetch(request, call)
                self._engine.add(request)
                async with aclosing(self._events(prompt)) as events:
                    async for event in events:
                        yield event
        finally:
            await self._cleanups.run(self._let_go(prompt), f"let go of {request.request_id}")

    async def _events(self, prompt: _Prompt) -> PrefillEvents:
        shipped = asyncio.gather(*(rank.shipped(prompt.key) for rank in self._ranks))
        try:
            while len(prompt.first_tokens) < prompt.request.params.n:
                output = await _before(prompt.outputs.take(), shipped)
                if isinstance(output, Admitted):
                    yield _admitted(output)
                else:
                    prompt.first_tokens.append(output)
            goes_on = any(not token.finish_reason for token in prompt.first_tokens)
            tokens = [token.to_proto() for token in prompt.first_tokens]
            if goes_on:
                self._shipper.finish(prompt.request.request_key, tokens)
            yield _first_tokens(tokens, prompt)
            if goes_on:
                reports = await shipped
                self._confirmed(prompt.key)
                yield _done(prompt.request, reports)
                prompt.committed = True
            else:
                prompt.ends = "the prompt's first token was its last"
                yield _done(prompt.request, [])
        finally:
            shipped.cancel()
            (end,) = await asyncio.gather(shipped, return_exceptions=True)
            if _is_loss(end):  # by the link, or in the cache
                self._engine.suspect(prompt.request.names)

    async def _let_go(self, prompt: _Prompt) -> None:
        if not prompt.committed:
            self._engine.cancel(prompt.request)
            await asyncio.gather(*(rank.abort(prompt.key, prompt.ends) for rank in self._ranks))
            self._confirmed(prompt.key)
        self._engine.release_held(prompt.request)

    def _confirmed(self, key: ShipmentKey) -> None:
        """No rank reads anything for it any more."""
        for rank in range(1, len(self._ranks)):
            self._shipper.confirmed(key, rank)


async def _before(
    take: Coroutine[Any, Any, Admitted | TokenOutput], shipped: "asyncio.Future[Any]"
) -> Admitted | TokenOutput:
    """The engine's next output, unless a shipment fails first: then its failure."""
    taken = asyncio.ensure_future(take)
    try:
        await asyncio.wait({taken, shipped}, return_when=asyncio.FIRST_COMPLETED)
        if not taken.done():
            shipped.result()
        return await taken
    finally:
        taken.cancel()


def _is_loss(end: object) -> bool:
    if isinstance(end, TransferFailed):
        return end.code is Code.DATA_LOSS
    return isinstance(end, grpc.aio.AioRpcError) and end.code() is grpc.StatusCode.DATA_LOSS


def _order(call: pb.PrefillRequest, request: Request, identity: Identity) -> ShipmentOrder:
    return ShipmentOrder(
        key=ShipmentKey(call.transfer_id, call.attempt, identity.epoch, call.target.epoch),
        request_key=request.request_key,
        num_tokens=len(request.prompt),
        target=Target.from_proto(call.target),
        wire=call.wire,
        other_wires=tuple(call.other_wires),
    )


def _admitted(admitted: Admitted) -> pb.PrefillEvent:
    return pb.PrefillEvent(admitted=pb.PrefillAdmitted(cached_tokens=admitted.num_cached_tokens))


def _first_tokens(tokens: list[pb.GeneratedToken], prompt: _Prompt) -> pb.PrefillEvent:
    request, fetched = prompt.request, prompt.fetched
    return pb.PrefillEvent(
        first_tokens=pb.FirstTokens(
            tokens=tokens,
            cached_tokens=request.num_cached_tokens,
            queue_ms=request.queue_ms,
            compute_ms=request.compute_ms,
            fetched_tokens=fetched.counted(request.num_cached_tokens),
            fetched_bytes=fetched.num_bytes,
            fetch_ms=fetched.ms,
        )
    )


def _done(request: Request, reports: Sequence[ShipmentReport]) -> pb.PrefillEvent:
    return pb.PrefillEvent(
        done=pb.PrefillDone(
            computed_tokens=request.num_computed_tokens,
            shipped_bytes=sum(report.bytes for report in reports),
            transfer_ms=max((report.transfer_ms for report in reports), default=0.0),
        )
    )
