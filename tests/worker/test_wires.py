"""The wires that a worker's settings make."""

import asyncio
import socket
import time

import pytest

from protos.transfer_pb2 import Hello
from transport.fault_wire import FaultWire
from transport.link import LinkClosed
from worker.settings import WorkerSettings
from worker.wires import connectors


@pytest.mark.parametrize("wire", ["grpc", "tcp", "shm"])
async def test_a_call_into_a_silent_network_ends_when_the_setting_says(wire: str) -> None:
    settings = WorkerSettings.model_validate(
        {"name": "p0", "wires": [wire], "connect_timeout_s": 0.3}
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes calls, and says nothing
        began = time.monotonic()
        async with asyncio.timeout(10):
            with pytest.raises(LinkClosed, match=r"no welcome within 0\.3 s"):
                await connectors(settings)[wire].connect(
                    f"127.0.0.1:{silent.getsockname()[1]}", Hello()
                )
        assert 0.3 <= time.monotonic() - began < 5.0


def test_faults_may_be_of_some_wires_only() -> None:
    told = {"name": "p0", "wires": ["shm", "tcp", "grpc"], "test_faults": "wire=tcp flip=1"}
    made = connectors(WorkerSettings.model_validate(told))
    assert [wire for wire, each in made.items() if isinstance(each, FaultWire)] == ["tcp"]
    made = connectors(WorkerSettings.model_validate(told | {"test_faults": "flip=1"}))
    assert all(isinstance(each, FaultWire) for each in made.values())
