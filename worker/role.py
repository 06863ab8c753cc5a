"""What sets a prefill worker and a decode worker apart: a side on every rank, a front on rank 0."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc.aio

from engine.clock import Clock
from engine.engine import Engine
from engine.runner import SliceObserver
from kvcache.ledger import Ledger
from prefix_index.index import Manifest, Role
from transport.cells_servicer import PinsBlocks
from transport.counts import TransferCounts
from transport.link import Connector
from transport.orders import Identity
from transport.watch import Watch
from worker.admin import Doors
from worker.cleanups import Cleanups
from worker.quarantines import GroupQuarantines
from worker.rank_parts import RankParts
from worker.settings import WorkerSettings
from worker.work import WorkIntake


@dataclass(frozen=True, slots=True)
class RankContext:
    """What a rank knows when its role's side is made."""

    settings: Any  # the role's own settings
    parts: RankParts
    identity: Identity
    manifest: Manifest
    clock: Clock
    connectors: Mapping[str, Connector]  # by wire: how a prefill rank reaches decode ranks
    ledger: Ledger
    names: PinsBlocks | None = None  # on ranks 1 and up: rank 0's, which has the engine


@dataclass(frozen=True, slots=True)
class Front:
    """What rank 0 has beyond that: the engine, and a channel to each of the other ranks."""

    engine: Engine
    intake: WorkIntake
    others: Sequence[grpc.aio.Channel]
    doors: Doors
    cleanups: Cleanups
    quarantines: GroupQuarantines


class RankSide(Protocol):
    """A role on one rank. Started before anything is served, closed when nothing runs any more."""

    @property
    def observer(self) -> SliceObserver | None:
        """What watches the engine's steps on this rank."""

    @property
    def open_transfers(self) -> int: ...

    @property
    def counts(self) -> TransferCounts:
        """Of this rank's transport."""

    @property
    def watch(self) -> Watch | None:
        """What this rank holds against others for the damage that came from them, if it does."""

    def serve_ranks(self, server: grpc.aio.Server) -> None:
        """Add what rank 0 and other workers' ranks call."""

    def serve_router(self, server: grpc.aio.Server, front: Front) -> None:
        """Add what the router calls; on rank 0 only."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RoleSpec:
    role: Role
    service: str  # the full gRPC name of what the router calls
    rank_module: str  # run for ranks 1 and up
    settings: type[WorkerSettings]
    make_side: Callable[[RankContext], RankSide]
