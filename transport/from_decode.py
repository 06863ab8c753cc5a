"""What decode ranks say to a prefill rank, frame by frame."""

from protos.transfer_pb2 import CellsAgain, DrainAck, Frame
from transport.clock import Clock
from transport.departure import Departure
from transport.departures import Departures
from transport.orders import Code, ShipmentKey, TransferFailed
from transport.port import Port


class DecodeFrames:
    """Acts on each frame; the shipments themselves belong to `departures`."""

    def __init__(self, departures: Departures, clock: Clock) -> None:
        self.counts = departures.counts
        self._departures = departures
        self._clock = clock

    async def handle(self, port: Port, frame: Frame) -> None:
        key, body = ShipmentKey.from_proto(frame.key), frame.WhichOneof("body")
        departure = self._departures.live.get(key)
        rank = port.link.welcome.decode_rank
        if departure is None or departure.ports.get(rank) is not port:
            known = departure is not None or key in self._departures.memory
            self.counts.late_frames += known
            self.counts.stale_frames += not known
            if body == "abort":
                port.post(Frame(key=frame.key, drain_ack=DrainAck()))
            return
        outgoing, pair = departure.outgoing, departure.outgoing.pairs[rank]
        if body == "abort":
            departure.drains.append(port)
            reason = f"{departure.name_of(rank)} gave up: {frame.abort.reason}"
            self._departures.fail(departure, Code.parse(frame.abort.code), reason)
            return
        if body == "drain_ack":
            self._departures.left(departure, rank)
        if outgoing.over:
            self.counts.late_frames += 1
            return
        pair.heard_at = self._clock.now()
        if body == "credit":
            if pair.grant(frame.credit.first_block, frame.credit.window_bytes):
                departure.book.resident(rank, frame.credit.first_block)
        elif body == "chunk_ack":
            if pair.acked(frame.chunk_ack.seq):
                if not pair.committed:  # else it was overtaken, and all of it is booked
                    departure.book.acked(rank, frame.chunk_ack.seq)
            else:
                self.counts.duplicate_chunks += 1
        elif body == "renew":
            pair.flows(frame.renew.num_received, pair.heard_at)
        elif body == "chunk_nack":
            self._resend(departure, rank, frame.chunk_nack.seq, frame.chunk_nack.reason)
        elif body == "cells_again":
            self._send_again(departure, rank, frame.cells_again)
        elif body == "commit" and outgoing.commit(rank):
            departure.book.committed(rank)
        outgoing.advance()
        if body != "chunk_ack" or pair.owes or outgoing.seal_due(rank):  # else it set nothing free
            departure.stirred[rank].set()
        self._departures.review(departure)

    def _resend(self, departure: Departure, rank: int, seq: int, reason: str) -> None:
        try:
            if departure.outgoing.pairs[rank].nacked(seq):
                departure.book.nacked(rank, seq)
                self.counts.resent_chunks += 1
        except TransferFailed as failure:
            who = departure.name_of(rank)
            self._departures.fail(
                departure, failure.code, f"{who}: {failure.reason}; the last: {reason}"
            )

    def _send_again(self, departure: Departure, rank: int, again: CellsAgain) -> None:
        pair = departure.outgoing.pairs[rank]
        for run in again.runs:
            heads = tuple(run.heads)
            found = departure.outgoing.places.find(run.layer, run.first_block, run.num_blocks)
            if found is None or not heads or not set(heads) <= set(pair.heads):
                self.counts.stale_frames += 1  # never sent: whoever asks is not talking of this
                continue
            pair.send_again(found, tuple(sorted(set(heads))))
            self.counts.resent_cells += run.num_blocks * len(heads)
