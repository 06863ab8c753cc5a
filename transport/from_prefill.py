"""What prefill ranks say to a decode rank, frame by frame.

Where the wire tells of a chunk before its payload is read, it is decided then whether it is wanted,
and the thread that reads verifies and writes it. Else a copying thread does, and meanwhile the link
reads on, as long as there is room for what waits. A frame of another life, or of a transfer that
has ended, changes nothing.
"""

import asyncio
from functools import partial

from kvcache.ledger_row import Reason
from kvcache.mapped_pool import MappedCells
from protos.transfer_pb2 import (
    Chunk,
    ChunkAck,
    ChunkNack,
    Commit,
    Credit,
    DrainAck,
    Frame,
    Open,
    SealAll,
)
from transport.arrivals import Arrivals, Early, abort_frame, name_of
from transport.books import late
from transport.cell_runs import layers_of, run_in, runs_in
from transport.chunk_check import chunk_check
from transport.clock import Clock
from transport.config import TransportConfig
from transport.incoming import Remedy, Verdict
from transport.lander import Lander
from transport.landing import Landed, Landing
from transport.landing_cells import Catcher
from transport.link import LinkClosed, Payload
from transport.mender import Mender
from transport.orders import Code, ShipmentKey, TransferFailed
from transport.pieces import GIVEN_UP, staged
from transport.port import Port

REFUSALS = {
    Verdict.KNOWN: Reason.DUPLICATE,
    Verdict.BUSY: Reason.DUPLICATE,
    Verdict.BAD: Reason.BAD,
    Verdict.STRAY: Reason.STRAY,
}

ACK_WITHIN_S = 0.05  # of what nobody waits for
PASSING_WINDOWS = 16  # of what is stored nowhere: acknowledgements hold up nobody


class PrefillFrames:
    """Acts on each frame; the transfers themselves belong to `arrivals`."""

    def __init__(
        self,
        arrivals: Arrivals,
        lander: Lander,
        mender: Mender,
        clock: Clock,
        config: TransportConfig,
    ) -> None:
        self.counts = arrivals.counts
        self._arrivals = arrivals
        self._epoch = arrivals.identity.epoch
        self._lander = lander
        self._mender = mender
        self._clock = clock
        self._config = config

    async def handle(self, port: Port, frame: Frame, payload: Payload) -> None:
        hello, key = port.link.hello, ShipmentKey.from_proto(frame.key)
        if (key.prefill_epoch, key.decode_epoch) != (
            hello.prefill_epoch,
            self._epoch,
        ):
            self._drop_stale(port, key, frame)
            return
        landing = self._arrivals.live.get(key)
        if landing is None:
            self._handle_unknown(port, key, frame)
            return
        self._move(landing, port)
        if frame.HasField("open"):
            self.open(landing, port, frame.open)
        if landing.ports.get(hello.prefill_rank) is not port:
            self.counts.stale_frames += 1
            return
        landing.incoming.pairs[hello.prefill_rank].heard_at = self._clock.now()
        match frame.WhichOneof("body"):
            case "chunk":
                await self._take(landing, port, frame, payload)
            case "seal_all":
                self._seal(landing, port, frame.seal_all)
            case "abort":
                landing.drains.append(port)
                reason = f"{name_of(hello)} gave up: {frame.abort.reason}"
                self._arrivals.fail(landing, Code.parse(frame.abort.code), reason)

    def _move(self, landing: Landing, port: Port) -> None:
        """A prefill rank whose link went after it had sent all goes on over its next one."""
        hello, rank = port.link.hello, port.link.hello.prefill_rank
        bound = landing.ports.get(rank)
        same = hello.prefill_instance == landing.order.prefill_instance
        if same and bound is not None and not bound.open and port.open:
            landing.ports[rank] = port
            landing.incoming.pairs[rank].gone = ""

    def _drop_stale(self, port: Port, key: ShipmentKey, frame: Frame) -> None:
        """A frame of another life of ours or theirs; one that asks for an answer gets a no."""
        self.counts.stale_frames += 1
        if frame.HasField("open"):
            ours = f"prefill {port.link.hello.prefill_epoch}, decode {self._epoch}"
            reason = f"epochs are {ours}, not {key.prefill_epoch} and {key.decode_epoch}"
            port.post(abort_frame(key, TransferFailed(Code.FAILED_PRECONDITION, reason)))

    def _handle_unknown(self, port: Port, key: ShipmentKey, frame: Frame) -> None:
        """Of a transfer that has ended, or that nobody has ordered yet."""
        hello, body = port.link.hello, frame.WhichOneof("body")
        if body == "abort":
            self._arrivals.early.pop(key, None)
            reason = f"{name_of(hello)} gave up: {frame.abort.reason}"
            self._arrivals.turn_away(key, TransferFailed(Code.parse(frame.abort.code), reason))
            port.post(Frame(key=key.to_proto(), drain_ack=DrainAck()))
        elif body == "drain_ack":
            pass  # they read no more, and nothing of theirs is written here
        elif key in self._arrivals.memory:
            ended = self._arrivals.memory.failure(key)
            if body in ("open", "seal_all") and ended is not None:
                port.post(abort_frame(key, ended))
            elif body == "seal_all":
                port.post(Frame(key=key.to_proto(), commit=Commit()))
            if body == "chunk":
                late(self._arrivals.ledger, key, hello.prefill_rank, frame.chunk)
            self.counts.late_frames += 1
        elif body == "open" and len(self._arrivals.early) < self._config.max_remembered:
            expires_at = self._clock.now() + self._config.open_wait_s
            early = Early(port, frame.open, expires_at)
            self._arrivals.welcome(key, hello.prefill_rank, early)
        elif key not in self._arrivals.early:
            self.counts.stale_frames += 1

    def open(self, landing: Landing, port: Port, open_: Open) -> None:
        hello, order = port.link.hello, landing.order
        if hello.prefill_rank not in landing.incoming.pairs:
            ranks = ", ".join(map(str, landing.incoming.pairs))
            reason = f"{name_of(hello)} has no share of it: ranks {ranks} have"
            failure = TransferFailed(Code.FAILED_PRECONDITION, reason)
            port.post(abort_frame(order.key, failure))
            if not landing.incoming.whole:
                self._arrivals.fail(landing, failure.code, failure.reason)
            return
        bound = landing.ports.setdefault(hello.prefill_rank, port)
        if bound is not port:
            return
        try:
            if hello.prefill_instance != order.prefill_instance:
                reason = f"expected instance {order.prefill_instance}, but {name_of(hello)} called"
                raise TransferFailed(Code.FAILED_PRECONDITION, reason)
            wanted = landing.incoming.open(hello.prefill_rank, open_)
        except TransferFailed as failure:
            self._arrivals.fail(landing, failure.code, failure.reason)
            return
        self._arrivals.watch.opened(port, order.key)
        landing.incoming.pairs[hello.prefill_rank].heard_at = self._clock.now()
        if wanted:
            window_bytes = self._config.window_bytes
            if self._passes(landing, port, hello.prefill_rank):
                window_bytes *= PASSING_WINDOWS
            credit = Credit(first_block=landing.incoming.first_block, window_bytes=window_bytes)
            port.post(Frame(key=order.key.to_proto(), credit=credit))

    def _passes(self, landing: Landing, port: Port, rank: int) -> bool:
        """Whether nothing of this pair is stored on the way, so that no window need bound it."""
        if port.pool is not None:
            return True
        return port.tells_ahead and self._lander.catches(landing.incoming.pairs[rank].heads)

    def _is_damaged(self, landing: Landing, port: Port, chunk: Chunk, payload: Payload) -> bool:
        """Whether a chunk's header is not what was sent; it is then asked for again."""
        if chunk.check == chunk_check(landing.order.key, chunk):
            return False
        self.counts.damaged_chunks += 1
        num_cells = _num_cells(landing, payload)
        self._arrivals.watch.landed(port, num_cells, num_cells)
        landing.book.refused(port.link.hello.prefill_rank, chunk, Reason.BAD)
        self._ask_again(landing, port, chunk, "a chunk's header is not what was sent")
        return True

    async def _take(self, landing: Landing, port: Port, frame: Frame, payload: Payload) -> None:
        rank, chunk = port.link.hello.prefill_rank, frame.chunk
        if self._is_damaged(landing, port, chunk, payload):
            return
        heads = landing.incoming.pairs[rank].heads
        cells: memoryview | None = None
        catcher: Catcher | None = None
        if payload is None or isinstance(payload, memoryview):
            cells = payload
        elif (
            chunk.heads or (catcher := self._lander.catcher(landing, heads, chunk, payload)) is None
        ):
            try:
                frame, cells = await staged(frame, payload)
            except LinkClosed:
                return  # who waits for the next frame hears why
            given_up = chunk.piece_blocks and frame.chunk.check == GIVEN_UP
            chunk = frame.chunk
            if given_up or self._is_damaged(landing, port, chunk, cells):
                return
        await port.room.acquire()
        if chunk.heads:
            self._take_again(landing, port, chunk, cells)
            return
        verdict = landing.incoming.offer(rank, chunk)
        if verdict is Verdict.TAKE:
            runs = runs_in(chunk, heads)
            landing.book.arrived(rank, chunk)
            if catcher is not None:
                job = self._lander.catch(landing, runs, chunk, catcher)
            else:
                given = cells if not chunk.pool_blocks else _pointed_at(landing, port, chunk)
                job = self._lander.land(landing, runs, chunk.digests, given)
            job.add_done_callback(partial(self._landed, landing, port, chunk))
            return
        port.room.release()
        landing.book.refused(rank, chunk, REFUSALS[verdict])
        if verdict is Verdict.KNOWN:
            self._ack(landing, port, chunk)
        if verdict in (Verdict.KNOWN, Verdict.BUSY):
            self.counts.duplicate_chunks += 1
        elif verdict is Verdict.BAD:
            self.counts.bad_chunks += 1
            last = chunk.first_block + chunk.num_blocks - 1
            where = f"layer {chunk.layer}, blocks {chunk.first_block}-{last}"
            self._ask_again(landing, port, chunk, f"{where}: not to come, or come already")
        else:
            self.counts.late_frames += 1

    def _landed(
        self, landing: Landing, port: Port, chunk: Chunk, job: asyncio.Future[Landed]
    ) -> None:
        port.room.release()
        landing.jobs.remove(job)
        landing.inlets.pop(job, None)
        rank = port.link.hello.prefill_rank
        error = job.exception()
        if error is not None and not isinstance(error, LinkClosed):
            landing.incoming.fail(Code.INTERNAL, f"layer {chunk.layer} was not written: {error!r}")
        landed = job.result() if error is None else Landed(written=False)
        if not landed.written:
            landing.book.given_up(rank, chunk)
            landing.incoming.dropped(rank, chunk)
            self._arrivals.review(landing)
            return
        heads = landing.incoming.pairs[rank].heads
        num_cells = len(layers_of(chunk)) * chunk.num_blocks * len(heads)
        self._note_damage(landing, port, num_cells, landed)
        landing.book.landed(rank, chunk, landed.bad)
        landing.incoming.landed(rank, chunk, landed.bad)
        self.counts.chunks += 1
        self.counts.bytes += chunk.payload_bytes
        if self._passes(landing, port, rank) or landing.incoming.filled:
            self._ack_soon(landing, port, chunk)
        else:
            self._ack(landing, port, chunk)
        self._arrivals.review(landing)
        self._mender.mend(landing)

    def _take_again(
        self, landing: Landing, port: Port, chunk: Chunk, payload: memoryview | None
    ) -> None:
        rank = port.link.hello.prefill_rank
        run = run_in(chunk, chunk.heads, chunk.layer)
        job = self._mender.take(landing, rank, run, chunk.digests, payload)
        if job is None:
            port.room.release()
            landing.book.refused(rank, chunk, Reason.DUPLICATE)
            self.counts.duplicate_chunks += 1
            return

        def landed(done: asyncio.Future[Landed]) -> None:
            port.room.release()
            if done.exception() is None:
                self._note_damage(landing, port, run.num_blocks * len(run.heads), done.result())
                self._mender.mend(landing)

        job.add_done_callback(landed)

    def _note_damage(self, landing: Landing, port: Port, num_cells: int, landed: Landed) -> None:
        if landed.written:
            num_bad = max(len(landed.bad), bool(landed.damage))
            self._arrivals.watch.landed(port, num_cells, num_bad)
        if landed.damage:
            self.counts.damaged_chunks += 1
            self.counts.damaged_cells += len(landed.bad)
            landing.incoming.pairs[port.link.hello.prefill_rank].num_damaged += 1

    def _ack(self, landing: Landing, port: Port, chunk: Chunk) -> None:
        ack = ChunkAck(seq=chunk.seq)
        port.post(Frame(key=landing.order.key.to_proto(), chunk_ack=ack))

    def _ack_soon(self, landing: Landing, port: Port, chunk: Chunk) -> None:
        """Where a chunk takes no room on the way, or is the last, nobody waits for word of it: the
        Commit, which says the same of all, may be here first. Half of what may be on its way
        is not waited for, or prefill would wait, nor for so long that it sends chunks again.
        """
        acks = landing.acks.setdefault(port, {})
        acks[chunk.seq] = chunk.payload_bytes
        if 2 * sum(acks.values()) > PASSING_WINDOWS * self._config.window_bytes:
            self._ack_all(landing, port)
        elif len(acks) == 1:
            within_s = min(ACK_WITHIN_S, self._config.resend_after_s / 2)
            asyncio.get_running_loop().call_later(within_s, self._ack_all, landing, port)

    def _ack_all(self, landing: Landing, port: Port) -> None:
        seqs = landing.acks.pop(port, {})  # of nothing, where they did not wait for this
        if not landing.incoming.over:
            for seq in seqs:
                ack = ChunkAck(seq=seq)
                port.post(Frame(key=landing.order.key.to_proto(), chunk_ack=ack))

    def _ask_again(self, landing: Landing, port: Port, chunk: Chunk, reason: str) -> None:
        match landing.incoming.damaged(port.link.hello.prefill_rank, chunk, reason):
            case Remedy.ASK:
                nack = ChunkNack(seq=chunk.seq, reason=reason)
                port.post(Frame(key=landing.order.key.to_proto(), chunk_nack=nack))
                self.counts.resent_chunks += 1
            case Remedy.LET_GO:
                self._ack(landing, port, chunk)
        self._arrivals.review(landing)
        self._mender.mend(landing)

    def _seal(self, landing: Landing, port: Port, seal: SealAll) -> None:
        rank = port.link.hello.prefill_rank
        for seq in landing.incoming.seal(rank, seal.num_chunks, tuple(seal.first_tokens)):
            landing.book.lost(rank, seq)
            nack = ChunkNack(seq=seq, reason="it never came")
            port.post(Frame(key=landing.order.key.to_proto(), chunk_nack=nack))
            self.counts.resent_chunks += 1
        self._arrivals.review(landing)


def _pointed_at(landing: Landing, port: Port, chunk: Chunk) -> MappedCells | None:
    """Where the cells of a chunk lie; None when there is no such place."""
    if port.pool is None:
        return None
    block_size = landing.incoming.shape.block_size
    return port.pool.cells(chunk.pool_blocks, block_size, chunk.tail_tokens or None)


def _num_cells(landing: Landing, payload: Payload) -> int:
    """About how many cells a payload holds, of which nothing else is known."""
    layer = landing.incoming.shape.layers[0]
    num_bytes = payload.nbytes if payload is not None else 0
    return max(1, num_bytes // layer.block_bytes(1))
