import asyncio
import socket
from collections.abc import AsyncGenerator
from typing import cast

import grpc
import httpx
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from grpc_status import rpc_status
from prometheus_client import CollectorRegistry, Counter

from engine.request import Admitted, Failed, TokenOutput
from model.source import open_model
from protos import worker_pb2, worker_pb2_grpc
from worker.admin import Doors
from worker.cleanups import Cleanups
from worker.doors import GrpcDoor
from worker.errors import CannotStart
from worker.outputs import Outputs
from worker.rank_parts import head_map_of
from worker.refusal import Context, Refused
from worker.serving import serve_call
from worker.settings import WorkerSettings
from worker.system_server import Probe, SystemServer


async def test_outputs_come_in_order_and_a_failure_becomes_a_refusal() -> None:
    outputs = Outputs(asyncio.get_running_loop())
    await asyncio.to_thread(outputs.put, Admitted(16))
    await asyncio.to_thread(outputs.put, TokenOutput(0, 0, 5))
    await asyncio.to_thread(outputs.put, Failed("RESOURCE_EXHAUSTED", "outgrown"))
    assert await outputs.take() == Admitted(16)
    assert await outputs.take() == TokenOutput(0, 0, 5)
    with pytest.raises(Refused, match="outgrown") as refused:
        await outputs.take()
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_cleanup_goes_on_when_its_caller_is_cancelled() -> None:
    cleanups, go_on, ended = Cleanups(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await go_on.wait()
        ended.set()

    caller = asyncio.create_task(cleanups.run(work(), "work"))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    assert len(cleanups) == 1
    go_on.set()
    await cleanups.drain()
    assert ended.is_set()
    assert len(cleanups) == 0


async def test_probes_and_metrics_have_a_port_of_their_own() -> None:
    registry = CollectorRegistry()
    Counter("steps", "Steps", registry=registry).inc(3)
    ready = Probe(False, "draining")
    server = SystemServer("127.0.0.1", 0, lambda: Probe(True), lambda: ready, registry)
    await server.start()
    async with httpx.AsyncClient(base_url=f"http://{server.address}") as client:
        assert (await client.get("/live")).json() == {"ok": True}
        answer = await client.get("/ready")
        assert (answer.status_code, answer.json()["reason"]) == (503, "draining")
        assert "steps_total 3.0" in (await client.get("/metrics")).text
        assert (await client.head("/metrics")).status_code == 200
    await server.stop()


async def test_operators_answers_do_not_wait_for_receipts(monkeypatch: pytest.MonkeyPatch) -> None:
    listeners = []
    right = socket.create_server

    def noted(address: tuple[str, int]) -> socket.socket:
        listeners.append(right(address))
        return listeners[-1]

    monkeypatch.setattr(socket, "create_server", noted)
    well = Probe(True)
    server = SystemServer("127.0.0.1", 0, lambda: well, lambda: well, CollectorRegistry())
    await server.start()
    (listener,) = listeners
    assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    await server.stop()


async def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotStart, match=f"cannot listen on 127.0.0.1:{port}"):
            await GrpcDoor("127.0.0.1", port, ()).start()
        ready = Probe(True)
        system = SystemServer("127.0.0.1", port, lambda: ready, lambda: ready, CollectorRegistry())
        with pytest.raises(CannotStart, match=f"on 127.0.0.1:{port}: .* another system_port"):
            await system.start()


class _Refusing(worker_pb2_grpc.DecodeWorkerServicer):
    async def Decode(self, request: worker_pb2.DecodeRequest, context: Context) -> None:
        async def events() -> AsyncGenerator[worker_pb2.DecodeEvent, None]:
            yield worker_pb2.DecodeEvent(reserved=worker_pb2.DecodeReserved(cached_blocks=2))
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "no blocks", retry_after_s=1.5)

        await serve_call(context, Doors(), request.expected_instance, "i1", events())


async def test_a_refusal_carries_its_hint_and_a_replaced_worker_says_so() -> None:
    door = GrpcDoor("127.0.0.1", 0, ("kvferry.v1.DecodeWorker",))
    worker_pb2_grpc.add_DecodeWorkerServicer_to_server(_Refusing(), door.server)
    await door.start()
    async with grpc.aio.insecure_channel(door.address) as channel:
        stub = worker_pb2_grpc.DecodeWorkerStub(channel)
        events = []
        with pytest.raises(grpc.aio.AioRpcError, match="no blocks") as full:
            async for event in stub.Decode(worker_pb2.DecodeRequest(expected_instance="i1")):
                events.append(event)
        assert events[0].reserved.cached_blocks == 2
        status = rpc_status.from_call(cast(grpc.Call, full.value))
        assert status is not None
        (detail,) = status.details
        hint = RetryInfo()
        assert detail.Unpack(hint)
        assert hint.retry_delay.ToMilliseconds() == 1500
        with pytest.raises(grpc.aio.AioRpcError, match="this is instance i1, not i0") as replaced:
            async for _ in stub.Decode(worker_pb2.DecodeRequest(expected_instance="i0")):
                pass
        assert replaced.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    await door.stop()


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", ""), ("name", "a b"), ("tp", 0), ("block_size", 12), ("wires", ()), ("port", 70_000)],
)
def test_settings_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        WorkerSettings.model_validate({"name": "w", field: value})


def test_more_ranks_than_query_heads_are_refused_at_start_with_the_numbers() -> None:
    source = open_model("checksum")
    for tp in (2, 4, 6, 9):
        assert head_map_of(WorkerSettings(name="p0", tp=tp), source).tp == tp
    sentence = r"p0 cannot run checksum at tp 10: tensor parallel size 10 is outside 1\.\.9"
    with pytest.raises(CannotStart, match=sentence):
        head_map_of(WorkerSettings(name="p0", tp=10), source)


def test_nccl_without_cuda_is_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="the wire nccl needs device cuda, not cpu"):
        WorkerSettings.model_validate({"name": "w", "wires": ("nccl",)})


def test_a_card_computes_in_bf16_unless_it_is_told_otherwise() -> None:
    assert WorkerSettings(name="w").dtype == "float32"
    assert WorkerSettings(name="w", device="cuda").dtype == "bfloat16"
    assert WorkerSettings(name="w", device="cuda", dtype="float16").dtype == "float16"


def test_packed_weights_are_for_cpus() -> None:
    with pytest.raises(ValueError, match="weights int8 need device cpu, not cuda"):
        WorkerSettings(name="w", weights="int8", device="cuda")
    assert WorkerSettings(name="w", weights="stored").device == "cpu"
