"""From a sealed run to the wire: pumps cut what credit allows, a thread gathers and sends it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import structlog

from kvcache.kept_digests import BlockRotten
from transport.clock import Clock
from transport.copiers import Copiers
from transport.departure import Departure, Pool, gather, point, pouring
from transport.departures import Departures
from transport.link import LinkClosed
from transport.orders import Code, TransferFailed
from transport.outgoing_pair import SHOWN_CHUNKS, STREAMED_CHUNKS
from transport.peers import Peers
from transport.port import Port
from transport.sealed_runs import Part

log = structlog.get_logger()

FoundRotten = Callable[[Sequence[int]], Awaitable[None]]  # blocks of the pool, one of them is

PUMPS = 3  # per pair: the wire's thread shall always have another chunk to begin with


class Pumps:
    """Moves the bytes of every departure; each pump ends with its departure."""

    def __init__(
        self,
        departures: Departures,
        peers: Peers,
        store: Pool,
        copiers: Copiers,
        clock: Clock,
        found_rotten: FoundRotten,
    ) -> None:
        self.counts = departures.counts
        self._departures = departures
        self._peers = peers
        self._store = store
        self._copiers = copiers
        self._clock = clock
        self._found_rotten = found_rotten
        self._own_rank = departures.identity.rank

    def start(self, departure: Departure) -> None:
        """Dial every decode rank of the departure, and pump to those that answer."""
        for rank in departure.outgoing.pairs:
            port = self._peers.port_at_hand(departure.order, rank)
            if port is not None:  # decode answers while we do what else there is to do
                departure.ports[rank] = port
                self._begin(departure, rank, port)
            else:
                self._departures.spawn(departure, self._open(departure, rank))

    def ask_again(self, departure: Departure, rank: int, lost: str) -> None:
        """The link went after all was sent: over a new one, ask whether decode has committed."""
        self.counts.ends_asked += 1
        self._departures.spawn(departure, self._ask(departure, rank, lost))

    async def _open(self, departure: Departure, rank: int) -> None:
        try:
            port = await self._dial(departure, rank)
        except TransferFailed as failure:
            self._departures.fail(departure, failure.code, failure.reason)
            return
        self._begin(departure, rank, port)

    def _begin(self, departure: Departure, rank: int, port: Port) -> None:
        pair = departure.outgoing.pairs[rank]
        pair.heard_at = self._clock.now()
        if port.shows_pool:
            pair.most_chunks = SHOWN_CHUNKS
        elif port.pours and self._store.streams(pair.heads):
            pair.most_chunks = STREAMED_CHUNKS
        port.post(departure.open_frame(rank))
        self._pump_to(departure, rank, port)

    async def _ask(self, departure: Departure, rank: int, lost: str) -> None:
        """Decode answers with its Commit, now or when it commits, or with why it gave up."""
        try:
            port = await self._dial(departure, rank)
        except TransferFailed as failure:
            reason = f"the link is lost ({lost}), and whether decode has committed is not known"
            self._departures.fail(departure, Code.UNAVAILABLE, f"{reason}: {failure.reason}")
            return
        port.post(departure.seal_frame(rank, self._own_rank))
        self._pump_to(departure, rank, port)  # cells may be asked for again yet

    def _pump_to(self, departure: Departure, rank: int, port: Port) -> None:
        for _ in range(PUMPS):
            self._departures.spawn(departure, self._pump(departure, rank, port))

    async def _dial(self, departure: Departure, rank: int) -> Port:
        """The departure's port to a decode rank from now on. Raises TransferFailed."""
        try:
            port = await self._peers.port_to(departure.order, rank)
        except TransferFailed:
            raise
        except Exception as error:  # a wire that this machine cannot make: nobody else would say so
            where = f"{departure.name_of(rank)} over {departure.order.wire}"
            reason = f"cannot open a link to {where}: {type(error).__name__}: {error}"
            raise TransferFailed(Code.UNAVAILABLE, reason) from error
        if not port.open:
            raise TransferFailed(Code.UNAVAILABLE, f"{departure.name_of(rank)} hung up")
        departure.ports[rank] = port
        return port

    async def _pump(self, departure: Departure, rank: int, port: Port) -> None:
        outgoing, pair = departure.outgoing, departure.outgoing.pairs[rank]
        try:
            while port.open and departure.ports[rank] is port:
                part = pair.take(port.reach)
                if part is not None:
                    await self._send(departure, rank, port, part)
                    continue
                if outgoing.seal_due(rank):
                    pair.seal_sent = True
                    port.post(departure.seal_frame(rank, self._own_rank))
                    outgoing.advance()
                departure.stirred[rank].clear()
                await departure.stirred[rank].wait()
        except LinkClosed:
            pass  # `_lose` is told, too
        except BlockRotten as error:  # decode takes nothing of it
            try:  # before anybody hears that this failed and tries again, the engine knows why
                await self._found_rotten(error.block_ids)
            except Exception as untold:  # whoever reads the blocks next finds it out
                key = str(departure.order.key)
                log.warning("rotten_blocks_not_told", transfer=key, reason=repr(untold))
            self._departures.fail(departure, Code.DATA_LOSS, f"{pair.where()}: {error}")
        except OSError as error:  # of this wire: another pair may do better
            self._departures.fail(
                departure, Code.UNAVAILABLE, f"{pair.where()} cannot be sent: {error!r}"
            )
        except Exception as error:
            self._departures.fail(
                departure, Code.INTERNAL, f"{pair.where()} cannot be sent: {error!r}"
            )

    async def _send(self, departure: Departure, rank: int, port: Port, part: Part) -> None:
        pair = departure.outgoing.pairs[rank]
        heads = part.heads or pair.heads
        num_bytes = part.num_bytes(departure.shape, heads)
        if departure.began_at is None:
            departure.began_at = self._clock.now()
        what = (self._store, departure, rank, heads, part)
        if port.shows_pool and not part.heads:  # what came damaged shall come another way
            departure.lookers.setdefault(rank, asyncio.Event())
            await port.point(point(*what), self._copiers)
        else:
            filled, poured = partial(gather, *what), partial(pouring, *what, num_bytes)
            if port.pours and not part.heads:
                pair.leaves(part.seq)
            await port.load(num_bytes, filled, poured, self._copiers)
        if not part.heads:
            pair.sent(part.seq, self._clock.now())
        self.counts.chunks += 1
        self.counts.bytes += num_bytes
        departure.outgoing.advance()
