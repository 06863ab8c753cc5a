"""What a prefill worker does on each rank: ship its heads, and take those of blocks that others
hold; on rank 0, answer the router.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc.aio

from prefill_worker.borrowing import MOST_S, Borrowing
from prefill_worker.prefilling import Prefilling
from prefill_worker.ranks import LocalRank, PrefillRankServicer, RemoteRank, ShipsPrompts
from prefill_worker.sealing import SealingObserver
from prefill_worker.settings import PrefillSettings
from prefix_index.index import Role
from protos import rank_pb2_grpc, transfer_pb2_grpc, worker_pb2, worker_pb2_grpc
from transport.borrower import Borrower
from transport.cells_servicer import CellsServicer, PinsBlocks
from transport.counts import TransferCounts
from transport.pull import GrpcPuller
from transport.shipper import Shipper
from transport.watch import Watch
from worker.named_blocks import NamedBlocks
from worker.refusal import Context
from worker.role import Front, RankContext, RoleSpec
from worker.serving import serve_call


class PrefillSide:
    def __init__(self, context: RankContext) -> None:
        settings, parts = context.settings, context.parts
        self._identity = context.identity
        self.names = context.names  # rank 0's come with its engine
        self._config = settings.transport()
        self._store = parts.store
        self._clock = context.clock
        self._block_size = parts.spec.block_size
        self._lenders = ThreadPoolExecutor(1, "kv-lend")
        self._borrowers = ThreadPoolExecutor(1, "kv-borrow")
        self._shipper = Shipper(
            context.identity,
            parts.head_map.kv,
            parts.store,
            connectors=context.connectors,
            manifest_digest=context.manifest.digest(),
            clock=context.clock,
            config=self._config,
            ledger=context.ledger,
            found_rotten=self._found_rotten,
        )
        self.observer = SealingObserver(
            self._shipper,
            parts.store.note_cells,
            parts.spec.num_layers,
            parts.spec.block_size,
            finishes_prompts=context.identity.rank > 0,
        )
        # Of what is shipped from here decode finds out what is damaged.
        self.watch = Watch(context.identity, context.clock, self._config, self._shipper.counts)
        borrower = Borrower(
            context.identity,
            parts.kv_heads,
            parts.store,
            GrpcPuller(MOST_S),
            self._borrowers,
            self._config,
            self.watch,
            context.ledger,
        )
        self.rank = LocalRank(self._shipper, self.observer, borrower)

    @property
    def open_transfers(self) -> int:
        return self._shipper.open_shipments

    @property
    def counts(self) -> TransferCounts:
        return self._shipper.counts

    def serve_ranks(self, server: grpc.aio.Server) -> None:
        if self._identity.rank > 0:
            servicer = PrefillRankServicer(self.rank)
            rank_pb2_grpc.add_PrefillRankServicer_to_server(servicer, server)
            cells = self._cells(self.names)
            transfer_pb2_grpc.add_CellsServicer_to_server(cells, server)

    def serve_router(self, server: grpc.aio.Server, front: Front) -> None:
        ranks: list[ShipsPrompts] = [self.rank]
        ranks += [RemoteRank(channel) for channel in front.others]
        prefilling = self.prefilling(front, ranks)
        servicer = _PrefillServicer(prefilling, self._identity.instance, front)
        worker_pb2_grpc.add_PrefillWorkerServicer_to_server(servicer, server)
        cells = self._cells(self.names)
        transfer_pb2_grpc.add_CellsServicer_to_server(cells, server)

    def prefilling(self, front: Front, ranks: Sequence[ShipsPrompts]) -> Prefilling:
        self.names = NamedBlocks(front.engine)
        borrowing = Borrowing(
            front.engine,
            self._identity,
            self._block_size,
            ranks,
            front.cleanups,
            self._clock,
            self._shipper.ledger,
        )
        return Prefilling(
            front.engine,
            front.intake,
            self._identity,
            self._shipper,
            ranks,
            front.cleanups,
            borrowing,
        )

    async def start(self) -> None:
        await self._shipper.__aenter__()

    async def close(self) -> None:
        await self._shipper.close()
        self._lenders.shutdown()
        self._borrowers.shutdown()

    async def _found_rotten(self, block_ids: Sequence[int]) -> None:
        if self.names is not None:
            await self.names.suspect(block_ids)

    def _cells(self, blocks: PinsBlocks | None = None) -> CellsServicer:
        lend = self._shipper.lend
        ledger = self._shipper.ledger
        return CellsServicer(self._store, self._lenders, self._config, lend, blocks, ledger)


class _PrefillServicer(worker_pb2_grpc.PrefillWorkerServicer):
    def __init__(self, prefilling: Prefilling, instance: str, front: Front) -> None:
        self._prefilling = prefilling
        self._instance = instance
        self._front = front

    async def Prefill(
        self,
        request: worker_pb2.PrefillRequest,
        context: Context,
    ) -> None:
        expected = request.expected_instance
        await serve_call(
            context, self._front.doors, expected, self._instance, self._prefilling.run(request)
        )


PREFILL = RoleSpec(
    role=Role.PREFILL,
    service="kvferry.v1.PrefillWorker",
    rank_module="prefill_worker.rank",
    settings=PrefillSettings,
    make_side=PrefillSide,
)
