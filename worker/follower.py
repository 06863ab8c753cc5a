"""The life of ranks 1 and up: load a share, open a door for peers, do what rank 0 says."""

import asyncio
import sys
from collections.abc import AsyncIterator

from engine import follower
from engine.clock import MonotonicClock
from engine.rank_group import RankSeat, join
from kvcache.ledger import Ledger
from model.comm import Comm
from model.source import open_model
from protos import rank_pb2, rank_pb2_grpc, worker_pb2
from transport.orders import Identity
from worker.admin import rank_report
from worker.doors import GrpcDoor
from worker.ledgers import open_ledger, parts_of
from worker.named_blocks import RemoteNames
from worker.rank_parts import build_rank, device_of, group_config, manifest_of
from worker.ranks import FRONT
from worker.refusal import Context
from worker.role import RankContext, RankSide, RoleSpec
from worker.wires import connectors

FIRST_NOTE_S = 60.0


def follow(spec: RoleSpec, arguments: list[str] | None = None) -> None:
    """The whole process of one rank. Ends when rank 0 says so, or with rank 0."""
    seat, _ = join(sys.argv[1:] if arguments is None else arguments)
    life = seat.wait("life", FIRST_NOTE_S)
    settings = spec.settings.model_validate(life["settings"])
    source = open_model(settings.model)
    comm = seat.connect(group_config(settings), device_of(settings, seat.rank))
    identity = Identity(settings.name, life["instance"], life["epoch"], seat.rank)
    names = RemoteNames(lambda: str(seat.wait(FRONT, settings.rank_timeout_s)["address"]))
    parts = build_rank(settings, source, comm)
    context = RankContext(
        settings,
        parts,
        identity,
        manifest_of(settings, source),
        MonotonicClock(),
        connectors(settings, parts.store.shown),
        open_ledger(settings, identity, spec.role.value),
        names,
    )
    asyncio.run(_serve(spec, context, seat, comm, names))


async def _serve(
    spec: RoleSpec, context: RankContext, seat: RankSeat, comm: Comm, names: RemoteNames
) -> None:
    side = spec.make_side(context)
    await side.start()
    door = GrpcDoor(context.settings.host, 0, ())
    side.serve_ranks(door.server)
    rank_pb2_grpc.add_RankLifeServicer_to_server(_LifeServicer(side, context.ledger), door.server)
    await door.start()
    seat.publish(f"address {seat.rank}", {"address": door.address})
    parts = context.parts
    try:
        await asyncio.to_thread(follower.run, parts.model, parts.store, comm, side.observer)
    finally:
        await door.stop()
        await names.close()
        await side.close()
        context.ledger.close()


class _LifeServicer(rank_pb2_grpc.RankLifeServicer):
    def __init__(self, side: RankSide, ledger: Ledger) -> None:
        self._side = side
        self._ledger = ledger

    async def Report(
        self, request: rank_pb2.RankReportRequest, context: Context
    ) -> rank_pb2.RankReport:
        return rank_report(self._side.open_transfers, self._side.watch)

    async def ReadLedger(
        self, request: worker_pb2.LedgerRequest, context: Context
    ) -> AsyncIterator[worker_pb2.LedgerPart]:
        for part in parts_of(self._ledger, request):
            yield part
