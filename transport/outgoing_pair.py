"""What one prefill rank still owes to one decode rank of a transfer: pure, no clock, no wire.

Sealed runs of blocks wait as ids, not bytes, until credit allows the next chunk; runs of one layer
that follow each other are joined meanwhile, and a chunk that is stored nowhere takes what waits of
more layers, too. It stays in flight until it is acknowledged, and is cut and numbered once: sent
again, it is the same chunk.
"""

from collections import deque
from dataclasses import dataclass, field

from transport.messages import MAX_PAYLOAD_BYTES
from transport.orders import Code, TransferFailed
from transport.pulse import due_at
from transport.sealed_runs import Part, Run
from transport.shipment import Shape

# As one, where it is stored nowhere, as each costs both ends some Python: where it leaves in
# pieces, and where decode reads it in prefill's pool, and begins only when it is told of all.
STREAMED_CHUNKS, SHOWN_CHUNKS = 4, 2
MAX_ASKS = 16  # for one chunk, repeated questions included
MAX_CELLS_AGAIN = 1024  # parts that wait; who asked for more than that will ask again


@dataclass(slots=True)
class _Flight:
    part: Part
    num_bytes: int
    sent_at: float | None = None
    leaving: bool = False  # what is sent from now on comes behind it
    resends: int = 0


@dataclass(slots=True)
class _Waiting:
    layer: int
    first_block: int
    block_ids: list[int]
    tail_tokens: int | None

    def let_go(self, resident: int) -> None:
        """Of blocks before that one."""
        held = min(len(self.block_ids), max(0, resident - self.first_block))
        if held:
            self.take(held)

    def continues(self, other: Run, layer: int) -> bool:
        """Whether these are the blocks of `other`, all of them, in `layer`."""
        same = (self.layer, self.first_block) == (layer, other.first_block)
        tails = self.tail_tokens == other.tail_tokens
        return same and tails and tuple(self.block_ids) == other.block_ids

    def take(self, count: int) -> Run:
        ids = tuple(self.block_ids[:count])
        del self.block_ids[:count]
        run = Run(self.layer, self.first_block, ids, None if self.block_ids else self.tail_tokens)
        self.first_block += count
        return run


@dataclass(slots=True)
class OutgoingPair:
    """The share of one decode rank."""

    heads: tuple[int, ...]
    shape: Shape
    chunk_bytes: int
    most_chunks: int = 1  # as one, where it goes out from where it lies, and is stored nowhere here
    most_bytes: int = 0  # of a chunk that is stored nowhere, over a fast wire; once credit is given
    heard_at: float = 0.0
    flowed_at: float = 0.0  # when decode was last known to receive something over the link
    first_block: int | None = None  # once credit is given
    committed: bool = False
    seal_sent: bool = False
    num_chunks: int = 0
    bytes_sent: int = 0
    unacked_bytes: int = 0
    _window_bytes: int = 0
    _num_received: int = 0  # there
    _waiting: deque[_Waiting] = field(default_factory=deque)
    _last_of: dict[int, _Waiting] = field(default_factory=dict)  # by layer
    _again: deque[int] = field(default_factory=deque)
    _flights: dict[int, _Flight] = field(default_factory=dict)
    _cells_again: deque[Part] = field(default_factory=lambda: deque(maxlen=MAX_CELLS_AGAIN))

    @property
    def idle(self) -> bool:
        """Everything sealed so far is sent and acknowledged."""
        return not self._flights and not self._has_waiting()

    @property
    def owes(self) -> bool:
        """Something is to be sent, now or when credit allows."""
        return bool(self._again or self._cells_again) or self._has_waiting()

    @property
    def all_sent(self) -> bool:
        """Everything sealed so far is on the wire, or will be before what is sent now."""
        flights = self._flights.values()
        sent = all(flight.leaving or flight.sent_at is not None for flight in flights)
        return sent and not self._again and not self._has_waiting()

    @property
    def all_left(self) -> bool:
        """Nothing that was taken waits for the wire."""
        return all(flight.sent_at is not None for flight in self._flights.values())

    def grant(self, first_block: int, window_bytes: int) -> bool:
        """Take credit; the first one counts. Returns whether this was it."""
        if self.first_block is not None:
            return False
        self.first_block, self._window_bytes = first_block, window_bytes
        if self.most_chunks > 1:  # and is stored nowhere there, where so much may be on its way
            most = min(window_bytes // 4, self.most_chunks * self.chunk_bytes)
            self.most_bytes = min(most, MAX_PAYLOAD_BYTES // 2)  # digests come on top of it
        return True

    def seal(self, run: Run) -> None:
        if not self.heads or not run.block_ids:
            return
        last = self._last_of.get(run.layer)
        if (
            last is not None
            and last.block_ids
            and last.tail_tokens is None
            and last.first_block + len(last.block_ids) == run.first_block
        ):
            last.block_ids.extend(run.block_ids)
            last.tail_tokens = run.tail_tokens
            return
        waiting = _Waiting(run.layer, run.first_block, list(run.block_ids), run.tail_tokens)
        self._waiting.append(waiting)
        self._last_of[run.layer] = waiting

    def take(self, reach: int = 1 << 62) -> Part | None:
        """The next chunk that credit allows, now in flight; None when there is none. `reach` is how
        many bytes the wire takes in a moment, as far as is known.

        Cells that are asked for again come first, and need no credit: they were paid for once.
        """
        if self._cells_again:
            return self._cells_again.popleft()
        if self._again:
            return self._flights[self._again.popleft()].part
        if self.first_block is None or not self._has_waiting():
            return None
        waiting = self._waiting[0]
        block_bytes = self.shape.layers[waiting.layer].block_bytes(len(self.heads))
        most = max(self.chunk_bytes, min(self.most_bytes, reach))
        count = min(len(waiting.block_ids), max(1, most // block_bytes))
        num_bytes = count * block_bytes
        if self.unacked_bytes and self.unacked_bytes + num_bytes > self._window_bytes:
            return None
        run = waiting.take(count)
        num_layers = self._take_layers(run, num_bytes, min(most, reach))
        num_bytes *= num_layers
        part = Part(self.num_chunks, run, num_layers=num_layers)
        self.num_chunks += 1
        self.unacked_bytes += num_bytes
        self.bytes_sent += num_bytes
        self._flights[part.seq] = _Flight(part, num_bytes)
        return part

    def leaves(self, seq: int) -> None:
        """The chunk waits for its turn on a wire that keeps the order."""
        if seq in self._flights:
            self._flights[seq].leaving = True

    def sent(self, seq: int, now: float) -> None:
        if seq in self._flights:
            self._flights[seq].sent_at = now

    def acked(self, seq: int) -> bool:
        """Returns whether the chunk was still in flight."""
        flight = self._flights.pop(seq, None)
        if flight is None:
            return False
        self.unacked_bytes -= flight.num_bytes
        if seq in self._again:
            self._again.remove(seq)
        return True

    def nacked(self, seq: int) -> bool:
        """Queue the chunk again. Returns whether it was in flight and not queued already.

        Decode decides how often it asks; raises TransferFailed when it never stops.
        """
        flight = self._flights.get(seq)
        if flight is None or flight.sent_at is None or seq in self._again:
            return False
        flight.resends += 1
        if flight.resends > MAX_ASKS:
            reason = f"{flight.part.run}: asked for {flight.resends} times"
            raise TransferFailed(Code.DATA_LOSS, reason)
        self._requeue(flight)
        return True

    def send_again(self, run: Run, heads: tuple[int, ...]) -> None:
        """Queue these cells of blocks that were sent before."""
        block_bytes = self.shape.layers[run.layer].block_bytes(len(heads))
        most = max(1, self.chunk_bytes // block_bytes)
        for start in range(0, len(run.block_ids), most):
            part = run.part(start, start + most)
            self._cells_again.append(Part(0, part, heads))

    def flows(self, num_received: int, now: float) -> None:
        """Decode says how much has come over the link."""
        if num_received != self._num_received:
            self._num_received, self.flowed_at = num_received, now

    def probe(self, now: float, patience_s: float) -> bool:
        """Queue the oldest chunk again if it has been without an answer for so long."""
        flight = next(iter(self._flights.values()), None)
        if flight is None or flight.sent_at is None or self._again:
            return False
        if now < due_at(flight.sent_at, self.flowed_at, patience_s):
            return False
        self._requeue(flight)
        return True

    def where(self) -> str:
        """The first cells that are not known to have arrived, for error messages."""
        if self._flights:
            return str(next(iter(self._flights.values())).part.run)
        if self._has_waiting():
            first = self._waiting[0]
            return str(Run(first.layer, first.first_block, (first.block_ids[0],)))
        return "after the last sealed block" if self.num_chunks else "before layer 0, block 0"

    def check(self) -> None:
        total = sum(flight.num_bytes for flight in self._flights.values())
        assert total == self.unacked_bytes, f"{total} bytes in flight, {self.unacked_bytes} counted"
        assert set(self._again) <= self._flights.keys()

    def _requeue(self, flight: _Flight) -> None:
        flight.sent_at, flight.leaving = None, False
        self._again.append(flight.part.seq)

    def _take_layers(self, run: Run, num_bytes: int, most: int) -> int:
        """Of `run`, which is taken, take the same blocks of the layers behind, too, as many of
        `num_bytes` each as wait and fit into one chunk of `most` that is stored nowhere. Returns
        how many layers that makes.
        """
        layers, taken = self.shape.layers, 1
        room = min(most, self._window_bytes - self.unacked_bytes)
        while self.most_chunks > 1 and (taken + 1) * num_bytes <= room:
            layer = run.layer + taken
            if not self._has_waiting() or not self._waiting[0].continues(run, layer):
                break
            if layers[layer] != layers[run.layer]:
                break
            self._waiting[0].take(len(run.block_ids))
            taken += 1
        return taken

    def _has_waiting(self) -> bool:
        """Whether a block waits that decode lacks; runs that it holds already are let go."""
        while self._waiting:
            first = self._waiting[0]
            first.let_go(self.first_block or 0)
            if first.block_ids:
                return True
            self._waiting.popleft()
        return False
