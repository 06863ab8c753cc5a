"""The wires a worker offers, by name, from its settings."""

from collections.abc import Mapping

import structlog

from engine.clock import MonotonicClock
from kvcache.kv_store import KvStore
from kvcache.mapped_pool import ShownPool
from transport.dist_wire import DistAcceptor, DistConnector
from transport.fault_wire import FaultWire
from transport.faults import Faults
from transport.grpc_wire import GrpcConnector
from transport.link import Acceptor, Connector
from transport.shm_wire import ShmAcceptor, ShmConnector
from transport.tcp_wire import TcpAcceptor, TcpConnector
from worker.settings import WorkerSettings

log = structlog.get_logger()


def connectors(settings: WorkerSettings, shown: ShownPool | None = None) -> Mapping[str, Connector]:
    """How a prefill rank reaches decode ranks; on its host they may read the pool that is shown."""
    made: dict[str, Connector] = {
        wire: _connector(wire, settings, shown) for wire in settings.wires
    }
    if not settings.test_faults:
        return made
    log.warning("wires_are_faulty_on_purpose", worker=settings.name, faults=settings.test_faults)
    faults = Faults.of(settings.test_faults)
    return {
        wire: FaultWire(inner, faults, MonotonicClock()) if faults.spec.concerns(wire) else inner
        for wire, inner in made.items()
    }


def acceptors(settings: WorkerSettings, store: KvStore | None = None) -> Mapping[str, Acceptor]:
    """How a decode rank takes in payloads that do not ride the control stream, into `store`."""
    return {wire: _acceptor(wire, settings, store) for wire in settings.wires if wire != "grpc"}


def _connector(wire: str, settings: WorkerSettings, shown: ShownPool | None) -> Connector:
    timeout_s = settings.connect_timeout_s
    control = GrpcConnector(wire=wire, timeout_s=timeout_s)
    match wire:
        case "grpc":
            return control
        case "tcp":
            return TcpConnector(control, timeout_s)
        case "shm":
            return ShmConnector(control, timeout_s, shown)
        case _:
            return DistConnector(control, wire, settings.host)


def _acceptor(wire: str, settings: WorkerSettings, store: KvStore | None) -> Acceptor:
    timeout_s = settings.connect_timeout_s
    match wire:
        case "tcp":
            return TcpAcceptor(settings.host, timeout_s)
        case "shm":
            reads = store is not None and store.takes_cells
            return ShmAcceptor(timeout_s, store.spec if store is not None and reads else None)
        case _:
            return DistAcceptor(settings.host)
