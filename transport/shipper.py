"""The prefill side: pushes a prompt's cells to every decode rank that needs them, as they seal.

The engine's thread calls `seal` for each layer of each step, which only notes block ids. On the
event loop, pumps cut them into chunks as credit allows; a copying thread gathers and digests them,
and the link's wire carries them. `ship` ends when every decode rank has committed, or raises;
either way nothing of the shipment reads its blocks any more. One task with its own timer ends what
nobody else ends.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from kvcache.head_map import HeadInterval
from kvcache.ledger import Ledger
from transport import books
from transport.books import own_ledger
from transport.clock import Clock
from transport.config import TransportConfig
from transport.copiers import Copiers
from transport.departure import Departure, Pool
from transport.departures import Departures
from transport.fences import ended
from transport.from_decode import DecodeFrames
from transport.inbox import Finished, Inbox, Note, Sealed
from transport.link import Connector
from transport.orders import (
    Code,
    FirstToken,
    Identity,
    ShipmentKey,
    ShipmentOrder,
    ShipmentReport,
)
from transport.peers import Peers
from transport.port import Port
from transport.pumps import FoundRotten, Pumps
from transport.reaper import reap
from transport.sealed_runs import Run, cut


class Shipper:
    """One prefill rank's end of every transfer. An async context manager: starts and stops."""

    def __init__(
        self,
        identity: Identity,
        source_intervals: Sequence[HeadInterval],
        store: Pool,
        connectors: Mapping[str, Connector],
        manifest_digest: bytes,
        clock: Clock,
        config: TransportConfig | None = None,
        ledger: Ledger | None = None,
        found_rotten: FoundRotten | None = None,
    ) -> None:
        """`found_rotten` hears of blocks that are not what they were when they were cached, before
        the shipments that need them fail.
        """
        self.identity = identity
        self._clock = clock
        self._config = config = config or TransportConfig()
        self.ledger = ledger or own_ledger(identity, "prefill")
        self._departures = Departures(
            identity, source_intervals, store.spec, clock, config, self.ledger
        )
        self._copiers = Copiers(config.copy_threads, "kv-gather")
        self._peers = Peers(
            identity,
            connectors,
            manifest_digest,
            config.send_timeout_s,
            DecodeFrames(self._departures, clock).handle,
            self._lose,
            self._departures.uses,
            clock,
        )
        tell = found_rotten or _tell_nobody
        self._pumps = Pumps(self._departures, self._peers, store, self._copiers, clock, tell)
        self._inbox = Inbox(self._read_note)
        self._early: OrderedDict[int, tuple[float, list[Note]]] = OrderedDict()
        self._reaper: asyncio.Task[None] | None = None
        self.counts = self._departures.counts

    async def __aenter__(self) -> Self:
        reaping = reap(self._clock, self._config.tick_s, self._tick, str(self.identity))
        self._reaper = asyncio.create_task(reaping)
        self._inbox.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def open_shipments(self) -> int:
        """Shipments whose blocks may still be read."""
        return len(self._departures.live)

    async def ship(self, order: ShipmentOrder) -> ShipmentReport:
        """Send this rank's share of a prompt; answers when every decode rank has committed.

        Raises TransferFailed. Once this has answered or raised, the blocks may be released.
        """
        assert self._reaper is not None, "the shipper is not started"
        departure = self._admit(order)
        try:
            return await departure.result
        except asyncio.CancelledError:
            self._departures.fail(departure, Code.CANCELLED, f"{self.identity} waits no more")
            raise
        finally:
            if not departure.drained.is_set():
                await ended([asyncio.ensure_future(departure.drained.wait())])

    def lend(self, key: ShipmentKey) -> Departure | None:
        """The shipment, while its blocks may be read: who does is one of its `readers`."""
        return self._departures.lend(key)

    def seal(
        self,
        request_key: int,
        layer: int,
        first_block: int,
        block_ids: Sequence[int],
        tail_tokens: int | None = None,
    ) -> None:
        """Blocks `first_block`.. of the prompt are complete in `layer`. Any thread; never waits.

        `tail_tokens` counts the tokens of the last of them when it is the prompt's partial tail.
        They must stay as they are until `ship` ends. May be called before `ship` is.
        """
        run = Run(layer, first_block, tuple(block_ids), tail_tokens)
        self._inbox.put(Sealed(request_key, run))

    def finish(self, request_key: int, first_tokens: Sequence[FirstToken] = ()) -> None:
        """Nothing more of the request will be sealed. Any thread; never waits."""
        self._inbox.put(Finished(request_key, tuple(first_tokens)))

    def confirmed(self, key: ShipmentKey, rank: int) -> None:
        """Nothing of the shipment is read on another rank of the group any more."""
        books.confirmed(self.ledger, key, rank)

    async def abort(self, key: ShipmentKey, reason: str, code: Code = Code.CANCELLED) -> None:
        """Give a shipment up, and tell decode why. Returns when its blocks are read no more."""
        await self._departures.abort(key, reason, code)

    async def close(self) -> None:
        """End every shipment and every link; returns when nothing of ours runs any more."""
        if self._reaper is None:
            return
        self._inbox.close()
        self._reaper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reaper
        self._reaper = None
        for departure in list(self._departures.live.values()):
            self._departures.fail(departure, Code.UNAVAILABLE, f"{self.identity} stops")
        await asyncio.gather(*self._departures.endings)
        await self._peers.close(f"{self.identity} stops")
        self._copiers.stop()

    def _admit(self, order: ShipmentOrder) -> Departure:
        departure = self._departures.begin(order)
        for note in self._early.pop(order.request_key, (0.0, []))[1]:
            self._take_note(departure, note)
        self._pumps.start(departure)
        departure.outgoing.advance()
        self._departures.review(departure)
        return departure

    def _lose(self, port: Port, reason: str) -> None:
        rank = port.link.welcome.decode_rank
        for departure in self._departures.lose(port, reason):
            self._pumps.ask_again(departure, rank, reason)

    # what the engine says

    def _read_note(self, note: Note) -> None:
        departure = self._departures.by_request.get(note.request_key)
        if departure is not None:
            self._take_note(departure, note)
        elif note.request_key not in self._departures.done_requests:
            expires_at = self._clock.now() + self._config.lease_s
            self._early.setdefault(note.request_key, (expires_at, []))[1].append(note)
            if len(self._early) > self._config.max_remembered:
                self._early.popitem(last=False)

    def _take_note(self, departure: Departure, note: Note) -> None:
        outgoing = departure.outgoing
        if outgoing.over:
            return
        if outgoing.finished:
            reason = f"{self.identity} sealed after the last: {note}"
            self._departures.fail(departure, Code.INTERNAL, reason)
        elif isinstance(note, Sealed):
            departure.book.bound(note.run.first_block, note.run.block_ids)
            outgoing.seal(cut(note.run, departure.shape))
        else:
            departure.first_tokens = note.first_tokens
            departure.book.finished()
            outgoing.finish()
        for stirred in departure.stirred.values():
            stirred.set()

    def _tick(self, now: float) -> None:
        self._departures.tick(now)
        for request_key, (expires_at, _) in list(self._early.items()):
            if expires_at <= now:
                del self._early[request_key]


async def _tell_nobody(block_ids: Sequence[int]) -> None:
    """Of a shipper without an engine."""
