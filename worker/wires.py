"""The wires a worker offers, by name, from its settings."""

from collections.abc import Mapping

from transport.dist_wire import DistAcceptor, DistConnector
from transport.grpc_wire import GrpcConnector
from transport.link import Acceptor, Connector
from worker.settings import WorkerSettings


def connectors(settings: WorkerSettings) -> Mapping[str, Connector]:
    """How a prefill rank reaches decode ranks."""
    return {
        wire: GrpcConnector()
        if wire == "grpc"
        else DistConnector(GrpcConnector(wire=wire), wire, settings.host)
        for wire in settings.wires
    }


def acceptors(settings: WorkerSettings) -> Mapping[str, Acceptor]:
    """How a decode rank takes in payloads that do not ride the control stream."""
    return {wire: DistAcceptor(settings.host) for wire in settings.wires if wire != "grpc"}
