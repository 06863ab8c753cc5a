"""What the two ends of a transfer enter into the ledger; see `kvcache.ledger_row` for the accounts.

Each is called where something has just happened, and decides nothing.
"""

import zlib
from collections.abc import Collection, Container, Iterable, Mapping, Sequence

from kvcache.ledger import Ledger
from kvcache.ledger_row import Account, Book, Origin, Reason, TransferKey, runs
from protos.transfer_pb2 import CellRun, Chunk
from transport.cell_runs import Cell, cells_of, layers_of, runs_in, runs_of
from transport.orders import Code, Identity, Lender, ShipmentKey
from transport.shipment import Shape

Heads = Sequence[tuple[int, int]]  # runs of KV heads: (first, count)
Where = tuple[range, int, int]  # layers, the first block, the number of blocks
ALL_LAYERS = range(-1, 0)
MAX_LAYERS = 4096  # of a chunk; of one that is refused no more than its transfer has
NO_CHUNK = 0xFFFF_FFFF  # cells that are fetched again, one by one


def own_ledger(identity: Identity, role: str) -> Ledger:
    """For an end that shares its process with no pool."""
    me = identity
    return Ledger(Origin(me.worker, me.instance, me.epoch, role, me.rank, tp=1))


def row_key(key: ShipmentKey) -> TransferKey:
    return TransferKey.of(key.transfer_id, key.attempt, key.prefill_epoch, key.decode_epoch)


class _TransferBook:
    def __init__(self, ledger: Ledger, key: ShipmentKey) -> None:
        self._ledger = ledger
        self._key = row_key(key)
        self._heads: dict[int, Heads] = {}  # by the rank at the other end

    def _order(
        self,
        account: Account,
        heads: Mapping[int, Sequence[int]],
        shape: Shape,
        first_block: int,
        life: str,
    ) -> None:
        block_bytes = sum(layer.block_bytes(1) for layer in shape.layers)
        for peer, ours in heads.items():
            self._heads[peer] = list(runs(ours)) or [(0, 0)]
            for head, num_heads in self._heads[peer]:
                self._ledger.post(
                    Book.CELLS,
                    Account.OUTSIDE,
                    account,
                    Reason.ORDERED,
                    key=self._key,
                    peer=peer,
                    layer=shape.num_layers,
                    head=head,
                    num_heads=num_heads,
                    first=first_block,
                    count=shape.num_blocks - first_block,
                    detail=zlib.crc32(life.encode()),
                    num_bytes=block_bytes,
                )

    def _bind(self, reason: Reason, first_block: int, block_ids: Sequence[int]) -> None:
        if block_ids:
            self._ledger.post_bindings(reason, self._key, first_block, list(runs(block_ids)))

    def _cells(
        self,
        source: Account,
        target: Account,
        reason: Reason,
        peer: int,
        chunk: int,
        where: Where,
        heads: Heads,
        num_bytes: int = 0,
    ) -> None:
        """One row for each layer and run of heads; `num_bytes` are of all."""
        layers, first, count = where
        shares = len(layers) * (sum(num_heads for _, num_heads in heads) or 1)
        for head, num_heads in heads:
            self._ledger.post(
                Book.CELLS,
                source,
                target,
                reason,
                key=self._key,
                peer=peer,
                layer=layers.start,
                num_layers=len(layers),
                head=head,
                num_heads=num_heads,
                first=first,
                count=count,
                detail=chunk,
                num_bytes=num_bytes * num_heads // shares & 0xFFFF_FFFF,
            )

    def _move(self, source: Account, target: Account, reason: Reason, count: int = 0) -> None:
        self._ledger.post(Book.TRANSFERS, source, target, reason, key=self._key, count=count)


class SendingBook(_TransferBook):
    """One shipment on one prefill rank."""

    def __init__(
        self,
        ledger: Ledger,
        key: ShipmentKey,
        heads: Mapping[int, Sequence[int]],
        shape: Shape,
        life: str,
    ) -> None:
        super().__init__(ledger, key)
        self._state = Account.OPEN
        self._sent: dict[tuple[int, int], Where] = {}
        self._bound: set[int] = set()  # blocks of the pool
        self._num_blocks = shape.num_blocks
        self._move(Account.OUTSIDE, Account.OPEN, Reason.ORDERED)
        self._order(Account.OWED, heads, shape, 0, life)

    def bound(self, first_block: int, block_ids: Sequence[int]) -> None:
        """Blocks of the pool are read from now on."""
        fresh = [block_id for block_id in block_ids if block_id not in self._bound]
        self._bound.update(fresh)
        self._bind(Reason.READ, first_block, fresh)

    def resident(self, peer: int, first_block: int) -> None:
        """Decode lacks the blocks from `first_block` on."""
        where = (ALL_LAYERS, 0, first_block)
        accounts = (Account.OWED, Account.RESIDENT)
        self._cells(*accounts, Reason.RESIDENT, peer, 0, where, self._heads[peer])

    def gathering(self, peer: int, chunk: int) -> None:
        """A thread reads blocks, until `gathered`."""
        self._job(Account.OUTSIDE, Account.READING, Reason.GATHERING, peer, chunk)

    def gathered(self, peer: int, chunk: int) -> None:
        self._job(Account.READING, Account.OUTSIDE, Reason.GATHERED, peer, chunk)

    def sent(self, peer: int, chunk: Chunk) -> None:
        """A chunk is handed to the wire."""
        where, size = _where(chunk), chunk.payload_bytes
        number, heads = chunk.seq, self._heads[peer]
        again = self._sent.get((peer, number)) == where
        if chunk.heads:
            number, heads, again = NO_CHUNK, list(runs(chunk.heads)), True
        else:
            self._sent[peer, number] = where
        source = Account.SENT if again else Account.OWED
        reason = Reason.RESENT if again else Reason.SENT
        self._cells(source, Account.SENT, reason, peer, number, where, heads, size)

    def acked(self, peer: int, chunk: int) -> None:
        self._answered(Account.ACKED, Reason.ACKED, peer, chunk)

    def nacked(self, peer: int, chunk: int) -> None:
        """Decode asks for it once more."""
        self._answered(Account.SENT, Reason.NACKED, peer, chunk)

    def committed(self, peer: int) -> None:
        where = (ALL_LAYERS, 0, self._num_blocks)
        accounts = (Account.SENT, Account.COMMITTED)
        self._cells(*accounts, Reason.COMMITTED, peer, 0, where, self._heads[peer])

    def finished(self) -> None:
        """The engine seals no more."""
        self._move(self._state, Account.SEALED, Reason.FINISHED)
        self._state = Account.SEALED

    def failed(self, code: Code, *, expired: bool = False) -> None:
        why = Reason.EXPIRED if expired else Reason[code.value]
        self._move(self._state, Account.ABORTING, why)
        self._state = Account.ABORTING

    def drained(self) -> None:
        """No thread reads for it any more."""
        if self._state is Account.ABORTING:
            self._move(self._state, Account.DRAINED, Reason.FENCED)
        else:
            self._move(self._state, Account.RELEASED, Reason.COMPLETED)

    def _answered(self, target: Account, reason: Reason, peer: int, chunk: int) -> None:
        where = self._sent.get((peer, chunk))
        if where is not None:
            self._cells(Account.SENT, target, reason, peer, chunk, where, self._heads[peer])

    def _job(self, source: Account, target: Account, reason: Reason, peer: int, chunk: int) -> None:
        self._ledger.post(Book.JOBS, source, target, reason, key=self._key, peer=peer, detail=chunk)


class ReceivingBook(_TransferBook):
    """One transfer on one decode rank."""

    def __init__(
        self,
        ledger: Ledger,
        key: ShipmentKey,
        heads: Mapping[int, Sequence[int]],
        shape: Shape,
        first_block: int,
        life: str,
    ) -> None:
        super().__init__(ledger, key)
        self._block_bytes = [layer.block_bytes(1) for layer in shape.layers]
        self._state = Account.RESERVED
        self._move(Account.OUTSIDE, Account.RESERVED, Reason.ORDERED)
        self._order(Account.EXPECTED, heads, shape, first_block, life)

    def bound(self, first_block: int, block_ids: Sequence[int]) -> None:
        """Blocks of the pool may be written from now on."""
        self._bind(Reason.WRITE, first_block, block_ids)

    def arrived(self, peer: int, chunk: Chunk) -> None:
        """A thread verifies and writes it, until `landed` or `given_up`."""
        self._chunk(Account.EXPECTED, Account.STAGED, Reason.ARRIVED, peer, chunk)

    def landed(self, peer: int, chunk: Chunk, bad: Collection[Cell]) -> None:
        """Its cells are in their blocks, but for the bad ones."""
        if not bad:
            self._chunk(Account.STAGED, Account.WRITTEN, Reason.VERIFIED, peer, chunk)
            return
        heads = [head for first, count in self._heads[peer] for head in range(first, first + count)]
        cells = [cell for run in runs_in(chunk, heads) for cell in cells_of(run)]
        self._settle(peer, chunk.seq, cells, bad)

    def given_up(self, peer: int, chunk: Chunk) -> None:
        self._chunk(Account.STAGED, Account.DROPPED, Reason.GIVEN_UP, peer, chunk)

    def fetched(self, peer: int, cells: Iterable[Cell]) -> None:
        """Cells of the share of rank `peer` are here again; as `arrived`, for the next two."""
        self._some(Account.EXPECTED, Account.STAGED, Reason.ARRIVED, peer, NO_CHUNK, cells)

    def mended(self, peer: int, cells: Sequence[Cell], bad: Container[Cell]) -> None:
        self._settle(peer, NO_CHUNK, cells, bad)

    def borrowed(self, key: ShipmentKey, lender: Lender, cells: Iterable[Cell]) -> None:
        """Cells that came by a call are verified and in their blocks."""
        life = zlib.crc32(lender.instance.encode())
        for run in runs_of(cells):
            _loan(self._ledger, Reason.BORROWED, key, lender.rank, run, life)

    def not_mended(self, peer: int, cells: Sequence[Cell]) -> None:
        self._some(Account.STAGED, Account.DROPPED, Reason.GIVEN_UP, peer, NO_CHUNK, cells)

    def refused(self, peer: int, chunk: Chunk, reason: Reason) -> None:
        """It came, and was not taken."""
        number = NO_CHUNK if chunk.heads else chunk.seq
        accounts = (Account.OUTSIDE, Account.DROPPED)
        where = _where(chunk, len(self._block_bytes))
        self._cells(*accounts, reason, peer, number, where, [(0, 0)])

    def lost(self, peer: int, chunk: int) -> None:
        """It never came, and is asked for."""
        accounts = (Account.EXPECTED, Account.EXPECTED)
        self._cells(*accounts, Reason.LOST, peer, chunk, (ALL_LAYERS, 0, 0), [(0, 0)])

    def whole(self) -> None:
        """Every cell of this rank is in its block; said once."""
        if self._state is Account.RESERVED:
            self._move(self._state, Account.WHOLE, Reason.WHOLE)
            self._state = Account.WHOLE

    def committed(self) -> None:
        self._move(self._state, Account.COMMITTED, Reason.COMPLETED)
        self._state = Account.COMMITTED

    def came(self, num_whole: int) -> None:
        """A fetch is over on this rank: nothing writes any more, and so many blocks are whole."""
        self._move(self._state, Account.COMMITTED, Reason.COMPLETED, num_whole)
        self._state = Account.COMMITTED

    def failed(self, code: Code) -> None:
        self._move(self._state, Account.ABORTING, Reason[code.value])
        self._state = Account.ABORTING

    def freed(self) -> None:
        """Nothing writes its blocks any more."""
        self._move(self._state, Account.FREED, Reason.FENCED)
        self._state = Account.FREED

    def _settle(self, peer: int, chunk: int, cells: Iterable[Cell], bad: Container[Cell]) -> None:
        every = list(cells)
        damaged = [cell for cell in every if cell in bad]
        good = [cell for cell in every if cell not in bad]
        accounts = (Account.STAGED, Account.EXPECTED)
        self._some(*accounts, Reason.DAMAGED, peer, chunk, damaged)
        accounts = (Account.STAGED, Account.WRITTEN)
        self._some(*accounts, Reason.VERIFIED, peer, chunk, good)

    def _some(
        self,
        source: Account,
        target: Account,
        reason: Reason,
        peer: int,
        chunk: int,
        cells: Iterable[Cell],
    ) -> None:
        for run in runs_of(cells):
            layers, heads = range(run.layer, run.layer + 1), list(runs(run.heads))
            where = (layers, run.first_block, run.num_blocks)
            size = self._block_bytes[run.layer] * run.num_blocks * len(run.heads)
            self._cells(source, target, reason, peer, chunk, where, heads, size)

    def _chunk(
        self, source: Account, target: Account, reason: Reason, peer: int, chunk: Chunk
    ) -> None:
        where, size = _where(chunk), chunk.payload_bytes
        self._cells(source, target, reason, peer, chunk.seq, where, self._heads[peer], size)


def _where(chunk: Chunk, most_layers: int = MAX_LAYERS) -> Where:
    """What the header says, right or wrong, as far as a row can hold it."""
    layer = chunk.layer & 0x7FFF
    last = layer + min(len(layers_of(chunk)), most_layers)
    return range(layer, min(last, 0x8000)), chunk.first_block, chunk.num_blocks


def late(ledger: Ledger, key: ShipmentKey, peer: int, chunk: Chunk) -> None:
    """A chunk came after its transfer's end."""
    ledger.post(
        Book.CELLS,
        Account.OUTSIDE,
        Account.DROPPED,
        Reason.LATE,
        key=row_key(key),
        peer=peer & 0xFFFF,  # nobody has looked at it
        layer=chunk.layer & 0x7FFF,
        first=chunk.first_block,
        count=chunk.num_blocks,
        detail=chunk.seq,
        num_bytes=chunk.payload_bytes & 0xFFFF_FFFF,
    )


def confirmed(ledger: Ledger, key: ShipmentKey, rank: int) -> None:
    """Another rank of the group has come to its end of the transfer."""
    accounts = (Account.OUTSIDE, Account.OUTSIDE)
    ledger.post(Book.TRANSFERS, *accounts, Reason.CONFIRMED, key=row_key(key), peer=rank)


def lent(ledger: Ledger, key: ShipmentKey, peer: int, run: CellRun) -> None:
    """Cells, in blocks of the prompt, are handed to decode rank `peer`."""
    _loan(ledger, Reason.LENT, key, peer, run, 0)


def pinned(ledger: Ledger, key: ShipmentKey, peer: int, block_ids: Sequence[int]) -> None:
    """Blocks of the pool are lent from to rank `peer`, and stay until `unpinned`."""
    _pin(ledger, Reason.PINNED, key, peer, block_ids)


def unpinned(ledger: Ledger, key: ShipmentKey, peer: int, block_ids: Sequence[int]) -> None:
    _pin(ledger, Reason.UNPINNED, key, peer, block_ids)


def _pin(
    ledger: Ledger, reason: Reason, key: ShipmentKey, peer: int, block_ids: Sequence[int]
) -> None:
    accounts = (Account.OUTSIDE, Account.OUTSIDE)
    for block_id, count in runs(block_ids):
        row = row_key(key)
        ledger.post(Book.LOANS, *accounts, reason, key=row, peer=peer, detail=block_id, count=count)


def kept(ledger: Ledger, key: ShipmentKey, block_ids: Sequence[int]) -> None:
    """These blocks, the first of a fetch, are whole on every rank, and may stay as cache."""
    row, accounts = row_key(key), (Account.OUTSIDE, Account.OUTSIDE)
    for block_id, count in runs(block_ids):
        ledger.post(Book.BINDINGS, *accounts, Reason.KEPT, key=row, detail=block_id, count=count)
    accounts = (Account.COMMITTED, Account.ADOPTED)
    ledger.post(Book.TRANSFERS, *accounts, Reason.ADOPTED, key=row, count=len(block_ids))


def _loan(
    ledger: Ledger, reason: Reason, key: ShipmentKey, peer: int, run: CellRun, life: int
) -> None:
    for head, num_heads in runs(run.heads):
        ledger.post(
            Book.LOANS,
            Account.OUTSIDE,
            Account.OUTSIDE,
            reason,
            key=row_key(key),
            peer=peer,
            layer=run.layer,
            head=head,
            num_heads=num_heads,
            first=run.first_block,
            count=run.num_blocks,
            detail=life,
        )


def adopted(ledger: Ledger, key: ShipmentKey) -> None:
    """The group's request runs on the blocks of a committed transfer."""
    accounts = (Account.COMMITTED, Account.ADOPTED)
    ledger.post(Book.TRANSFERS, *accounts, Reason.ADOPTED, key=row_key(key))
