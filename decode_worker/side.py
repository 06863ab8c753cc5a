"""What a decode group does on each rank: receive its heads; on rank 0, answer the router."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc.aio

from decode_worker.decoding import NO_DEADLINE_S, Decoding
from decode_worker.ranks import DecodeRankServicer, ReceivesPrompts, RemoteRank
from decode_worker.settings import DecodeSettings
from decode_worker.waiting_room import WaitingRoom
from prefix_index.index import Role
from protos import rank_pb2_grpc, transfer_pb2_grpc, worker_pb2, worker_pb2_grpc
from transport.cells_servicer import CellsServicer, PinsBlocks
from transport.counts import TransferCounts
from transport.receiver import Receiver
from transport.servicer import TransferServicer
from transport.watch import Watch
from worker.named_blocks import NamedBlocks
from worker.refusal import Context
from worker.role import Front, RankContext, RoleSpec
from worker.serving import serve_call
from worker.wires import acceptors


class DecodeSide:
    observer = None  # nothing is shipped from here

    def __init__(self, context: RankContext) -> None:
        settings, parts = context.settings, context.parts
        self._context = context
        self._lenders = ThreadPoolExecutor(1, "kv-lend")
        self._config = settings.transport()
        self.receiver = Receiver(
            context.identity,
            parts.kv_heads,
            parts.store,
            manifest_digest=context.manifest.digest(),
            clock=context.clock,
            config=self._config,
            ledger=context.ledger,
        )

    @property
    def open_transfers(self) -> int:
        return self.receiver.open_transfers

    @property
    def counts(self) -> TransferCounts:
        return self.receiver.counts

    @property
    def watch(self) -> Watch:
        return self.receiver.watch

    def serve_ranks(self, server: grpc.aio.Server) -> None:
        transfer = TransferServicer(
            self.receiver, acceptors(self._context.settings, self._context.parts.store)
        )
        transfer.add_to(server)
        if self._context.identity.rank > 0:
            servicer = DecodeRankServicer(self.receiver)
            rank_pb2_grpc.add_DecodeRankServicer_to_server(servicer, server)
            cells = self._cells(self._context.names)
            transfer_pb2_grpc.add_CellsServicer_to_server(cells, server)

    def serve_router(self, server: grpc.aio.Server, front: Front) -> None:
        ranks: list[ReceivesPrompts] = [self.receiver]
        ranks += [RemoteRank(channel) for channel in front.others]
        decoding = self.decoding(front, ranks)
        servicer = _DecodeServicer(decoding, self._context.identity.instance, front)
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(servicer, server)
        cells = self._cells(NamedBlocks(front.engine))
        transfer_pb2_grpc.add_CellsServicer_to_server(cells, server)

    def decoding(self, front: Front, ranks: Sequence[ReceivesPrompts]) -> Decoding:
        context, settings = self._context, self._context.settings
        waiting_room = WaitingRoom(
            front.engine, context.clock, settings.max_reserving, settings.reserve_wait_s
        )
        return Decoding(
            front.engine,
            front.intake,
            context.identity,
            self.receiver,
            ranks,
            waiting_room,
            front.cleanups,
            front.quarantines.against,
        )

    async def start(self) -> None:
        await self.receiver.__aenter__()

    async def close(self) -> None:
        await self.receiver.close()
        self._lenders.shutdown()

    def _cells(self, blocks: PinsBlocks | None = None) -> CellsServicer:
        store = self._context.parts.store
        ledger = self.receiver.ledger
        return CellsServicer(store, self._lenders, self._config, blocks=blocks, ledger=ledger)


class _DecodeServicer(worker_pb2_grpc.DecodeWorkerServicer):
    def __init__(self, decoding: Decoding, instance: str, front: Front) -> None:
        self._decoding = decoding
        self._instance = instance
        self._front = front

    async def Decode(
        self,
        request: worker_pb2.DecodeRequest,
        context: Context,
    ) -> None:
        expected = request.expected_instance
        remaining_s = context.time_remaining() or NO_DEADLINE_S
        events = self._decoding.run(request, remaining_s)
        await serve_call(context, self._front.doors, expected, self._instance, events)


DECODE = RoleSpec(
    role=Role.DECODE,
    service="kvferry.v1.DecodeWorker",
    rank_module="decode_worker.rank",
    settings=DecodeSettings,
    make_side=DecodeSide,
)
