"""A cluster in one event loop: real gRPC servers with scripted workers, a real index and router."""

import asyncio
import io
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import grpc.aio

from engine.clock import MonotonicClock
from model.source import open_model
from prefix_index.index import Load, Manifest, Role, WorkerRecord
from prefix_index.memory_index import MemoryIndex
from prefix_index.mirror import Mirror
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as rpc
from protos import worker_pb2 as wpb
from protos import worker_pb2_grpc as wrpc
from router.callers import EVERYONE, Callers
from router.entrance import Bounds
from router.fleet import Fleet
from router.generation import Handler
from router.grpc_door import GrpcDoor
from router.http_door import HttpDoor, HttpOptions
from router.http_server import HttpServer
from router.journal import journal
from router.line import Line
from router.metrics import Metrics
from router.public_prompts import PublicPrompts
from router.register import Register
from router.request import Tenant
from router.served_model import ServedModel
from router.validation import Validator
from router.walls import Walls
from transport.grpc_options import channel_options, server_options

BLOCK_SIZE = 16
DTYPE = "int64"
SOURCE = open_model("checksum")
MODEL = ServedModel.of(SOURCE)
MANIFEST = Manifest(
    protocol=1,
    model="checksum",
    namespace=SOURCE.namespace(DTYPE).hex(),
    block_size=BLOCK_SIZE,
    dtype=DTYPE,
    num_layers=4,
    num_query_heads=9,
    num_kv_heads=3,
    head_dim=4,
    max_context=SOURCE.max_context,
    vocab_size=SOURCE.vocab_size,
    wires=("grpc", "gloo"),
)
IDLE = Load(
    running=0,
    waiting=0,
    queued_tokens=0,
    free_blocks=1024,
    total_blocks=1024,
    prefill_ms_per_token=1.0,
    decode_step_ms=5.0,
    draining=False,
)
# Slow at prompts, so that pairs are preferred however short the prompt.
IDLE_DECODE = replace(IDLE, prefill_ms_per_token=50.0)
PROMPT = list(range(64))  # of four blocks
PINNED = pb.Pins(prefill="prefill-0", decode="decode-0")
Script = Callable[["FakeWorker", Any], AsyncIterator[Any]]


class Abort(Exception):
    """A script ends its call with this status."""

    def __init__(
        self, code: grpc.StatusCode, details: str = "", metadata: Sequence[Any] = ()
    ) -> None:
        super().__init__(details)
        self.code, self.details, self.metadata = code, details, tuple(metadata)


@dataclass
class FakeWorker:
    """One worker: `script` plays each call; what happened to the calls is kept."""

    cluster: "FakeCluster"
    name: str
    role: Role
    script: Script
    server: grpc.aio.Server = field(init=False)
    record: WorkerRecord = field(init=False)
    requests: list[Any] = field(default_factory=list)
    num_open: int = 0
    num_ended_early: int = 0

    async def start(self, epoch: int, load: Load, manifest: Manifest) -> None:
        self.server = grpc.aio.server(options=server_options())
        if self.role is Role.PREFILL:
            wrpc.add_PrefillWorkerServicer_to_server(_Prefills(self), self.server)
        else:
            wrpc.add_DecodeWorkerServicer_to_server(_Decodes(self), self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.record = WorkerRecord(
            name=self.name,
            role=self.role,
            instance=f"{self.name}-life-{epoch}",
            epoch=epoch,
            address=f"127.0.0.1:{port}",
            system_address="",
            rank_addresses=(f"127.0.0.1:{port}",),
            kv_intervals=((0, 3),),
            manifest=manifest,
            load=load,
        )

    async def play(self, request: Any, context: Any) -> None:
        self.requests.append(request)
        self.num_open += 1
        done = False
        try:
            async with aclosing(self.script(self, request)) as events:  # type: ignore[type-var]
                async for event in events:
                    await context.write(event)
            done = True
        except Abort as abort:
            done = True
            await context.abort(abort.code, abort.details, abort.metadata)
        finally:
            self.num_open -= 1
            self.num_ended_early += not done

    async def die(self) -> None:
        """Close every connection, as a killed process does."""
        await self.server.stop(None)


class _Prefills(wrpc.PrefillWorkerServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker

    async def Prefill(self, request: wpb.PrefillRequest, context: Any) -> None:
        await self._worker.play(request, context)


class _Decodes(wrpc.DecodeWorkerServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker

    async def Decode(self, request: wpb.DecodeRequest, context: Any) -> None:
        await self._worker.play(request, context)


@dataclass
class FakeCluster:
    """Workers answer with the bytes of `answer`, as the scripts below say."""

    stack: AsyncExitStack
    answer: str = "Hello, world"
    bounds: Bounds = field(default_factory=lambda: Bounds(admission_wait_s=0.2))
    max_requests: int = 64
    api_keys: Mapping[str, str] = field(default_factory=dict)
    public_prompts: Sequence[str] = ()
    workers: dict[str, FakeWorker] = field(default_factory=dict)
    shipments: dict[bytes, asyncio.Event] = field(
        default_factory=lambda: defaultdict(asyncio.Event)
    )
    lines: io.StringIO = field(default_factory=io.StringIO)
    afterwards: Callable[[Callable[[], None]], object] = lambda work: work()

    def __post_init__(self) -> None:
        self.clock = MonotonicClock()
        self.index = MemoryIndex(self.clock)
        self.mirror = Mirror(self.index, self.clock, survey_s=0.0, grace_s=0.0)
        log = journal(self.lines)

        def connect(address: str) -> grpc.aio.Channel:
            return grpc.aio.insecure_channel(address, options=channel_options())

        self.fleet = Fleet(self.mirror, MODEL.unfit, connect, self.clock, log, doubt_s=2.0)
        self.register = Register(self.max_requests, self.bounds.retry_after_s, self.clock)
        self.metrics = Metrics(MODEL.name)
        self.metrics.watch(self.fleet, lambda: self.register.num_open)
        self.line = Line(self.clock)
        self.metrics.watch_line(self.line)
        self.validator = Validator(
            MODEL,
            lambda: self.fleet.max_context(MODEL.max_context),
            1 << 16,
            seed=lambda: 7,
            public=PublicPrompts.of(MODEL, self.public_prompts),
        )
        self.handler = Handler(
            MODEL,
            self.validator,
            self.fleet,
            self.register,
            self.metrics,
            self.clock,
            log,
            self.bounds,
            self.line,
            walls=Walls(),
            afterwards=self.afterwards,
        )
        self.callers = Callers(self.api_keys)
        self.stack.push_async_callback(self._close)

    async def _close(self) -> None:
        for worker in self.workers.values():
            await worker.server.stop(None)
        await self.fleet.close()
        await self.index.close()

    async def add(
        self,
        name: str,
        script: Script | None = None,
        *,
        load: Load | None = None,
        manifest: Manifest = MANIFEST,
    ) -> FakeWorker:
        """Start a worker and let the router see it; its role is its name's first word."""
        role = Role(name.partition("-")[0])
        usual = prefill_script if role is Role.PREFILL else decode_script
        worker = FakeWorker(self, name, role, script or usual)
        load = load or (IDLE if role is Role.PREFILL else IDLE_DECODE)
        await worker.start(await self.index.next_epoch(name), load, manifest)
        self.workers[name] = worker
        await self.index.register(worker.record, 60.0)
        await self.mirror.step()
        return worker

    async def add_pair(self) -> tuple[FakeWorker, FakeWorker]:
        return await self.add("prefill-0"), await self.add("decode-0")

    async def leave(self, worker: FakeWorker) -> None:
        await self.index.deregister(worker.name, worker.record.epoch)
        await self.mirror.step()
        self.fleet.refresh()

    async def ask(self, tenant: Tenant = EVERYONE, **fields: Any) -> list[pb.GenerateResponse]:
        """All events of one request; raises RequestFailed."""
        async with aclosing(self.handler.generate(request(**fields), tenant, "test")) as events:
            return [event async for event in events]

    async def grpc_stub(self) -> Any:
        self.door = door = GrpcDoor(
            self.handler,
            self.callers,
            "127.0.0.1",
            0,
            max_requests=self.max_requests,
            max_message_bytes=1 << 20,
        )
        await door.start()
        await door.set_ready(not self.fleet.whats_missing())
        self.stack.push_async_callback(door.stop, 0)
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{door.port}")
        self.stack.push_async_callback(self.channel.close, None)
        return rpc.InferenceStub(self.channel)

    async def http_url(self, body_timeout_s: float = 5.0) -> str:
        options = HttpOptions(1 << 18, body_timeout_s, version="9.9", created=lambda: 1234.0)
        door = HttpDoor(
            self.handler, self.callers, self.metrics.registry, self.fleet.whats_missing, options
        )
        server = HttpServer(door.app, "127.0.0.1", 0, body_timeout_s)
        await server.start()
        self.stack.push_async_callback(server.stop)
        return f"http://127.0.0.1:{server.port}"

    def log(self, event: str = "request.ended") -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.lines.getvalue().splitlines()]
        return [line for line in lines if line["event"] == event]

    async def check(self) -> None:
        """Nothing is left of any request: no place, booking, leg, worker call or task."""
        await eventually(lambda: all(worker.num_open == 0 for worker in self.workers.values()))
        await eventually(lambda: self.register.num_open == 0)
        self.fleet.check()
        names = [task.get_name() for task in asyncio.all_tasks()]
        assert not [name for name in names if "-leg-" in name or name.startswith("stream-")]


async def eventually(holds: Callable[[], bool], timeout_s: float = 3.0) -> None:
    for _ in range(int(timeout_s / 0.01)):
        if holds():
            return
        await asyncio.sleep(0.01)
    assert holds()


def request(
    *,
    token_ids: Sequence[int] | None = None,
    text: str | None = None,
    chat: Sequence[tuple[str, str]] = (),
    pins: pb.Pins = PINNED,
    **sampling: Any,
) -> pb.GenerateRequest:
    """Without an input: PROMPT."""
    top = {key: sampling.pop(key) for key in ("request_id", "model", "explain") if key in sampling}
    sampling.setdefault("max_tokens", 100)
    message = pb.GenerateRequest(sampling=pb.SamplingParams(**sampling), pins=pins, **top)
    if text is not None:
        message.text = text
    elif chat:
        for role, content in chat:
            message.chat.messages.append(pb.ChatMessage(role=role, content=content))
    else:
        message.token_ids.ids.extend(PROMPT if token_ids is None else token_ids)
    return message


def without_pins(**fields: Any) -> dict[str, Any]:
    return {"pins": pb.Pins(), **fields}


def generated(
    answer: str, choice: int, index: int, sampling: pb.SamplingParams
) -> wpb.GeneratedToken:
    """The token at `index`; the answer's end is EOS, and max_tokens cuts it."""
    data = answer.encode()
    eos = index == len(data)
    token = wpb.GeneratedToken(choice=choice, index=index, token_id=257 if eos else data[index])
    if sampling.HasField("logprobs"):
        top = [pb.TopLogprob(token_id=token.token_id, logprob=-0.5)][: sampling.logprobs]
        token.logprobs.CopyFrom(pb.TokenLogprobs(token_id=token.token_id, logprob=-0.5, top=top))
    if eos:
        token.finish_reason, token.stop_token_id = "stop", 257
    elif index + 1 == sampling.max_tokens:
        token.finish_reason = "length"
    return token


def first_tokens(worker: FakeWorker, work: wpb.WorkRequest, cached: int = 0) -> wpb.PrefillEvent:
    tokens = [
        generated(worker.cluster.answer, choice, 0, work.sampling)
        for choice in range(work.sampling.n)
    ]
    return wpb.PrefillEvent(first_tokens=wpb.FirstTokens(tokens=tokens, cached_tokens=cached))


async def prefill_script(
    worker: FakeWorker, asked: wpb.PrefillRequest, cached: int = 0
) -> AsyncIterator[wpb.PrefillEvent]:
    yield wpb.PrefillEvent(admitted=wpb.PrefillAdmitted(cached_tokens=cached))
    firsts = first_tokens(worker, asked.work, cached)
    worker.cluster.shipments[asked.transfer_id].set()
    yield firsts
    yield prefill_done(asked.work, cached)


def prefill_done(work: wpb.WorkRequest, cached: int = 0) -> wpb.PrefillEvent:
    return wpb.PrefillEvent(
        done=wpb.PrefillDone(
            computed_tokens=len(work.prompt) - cached,
            shipped_bytes=4000,
            transfer_ms=2.0,
        )
    )


async def decode_script(
    worker: FakeWorker, asked: wpb.DecodeRequest
) -> AsyncIterator[wpb.DecodeEvent]:
    async for event in adopted(worker, asked):
        yield event
    async for event in rest(worker, asked):
        yield event


async def adopted(worker: FakeWorker, asked: wpb.DecodeRequest) -> AsyncIterator[wpb.DecodeEvent]:
    yield wpb.DecodeEvent(reserved=wpb.DecodeReserved(cached_blocks=0))
    if asked.transfer_id:
        await worker.cluster.shipments[asked.transfer_id].wait()
        yield wpb.DecodeEvent(adopted=wpb.DecodeAdopted(shipped_blocks=4, shipped_bytes=4000))


async def rest(
    worker: FakeWorker, asked: wpb.DecodeRequest, upto: int = 10**6, start: int | None = None
) -> AsyncIterator[wpb.DecodeEvent]:
    """Tokens from where prefill left off; choices take turns."""
    sampling = asked.work.sampling
    index = start if start is not None else 1 if asked.transfer_id else 0
    finished = False
    while not finished and index < upto:
        for choice in range(sampling.n):
            token = generated(worker.cluster.answer, choice, index, sampling)
            finished = bool(token.finish_reason)
            yield wpb.DecodeEvent(token=token)
        index += 1
    if finished:
        computed = 0 if asked.transfer_id else len(asked.work.prompt)
        yield wpb.DecodeEvent(done=wpb.DecodeDone(cached_tokens=0, computed_tokens=computed))


async def never() -> None:
    await asyncio.Event().wait()


def text_of(events: Sequence[pb.GenerateResponse], choice: int = 0) -> str:
    return "".join(
        event.delta.text
        for event in events
        if event.HasField("delta") and event.delta.choice == choice
    )


def ids_of(events: Sequence[pb.GenerateResponse], choice: int = 0) -> list[int]:
    """Token ids, after proof that indexes neither repeat nor skip."""
    deltas = [e.delta for e in events if e.HasField("delta") and e.delta.choice == choice]
    expected = 0
    ids: list[int] = []
    for delta in deltas:
        assert delta.index == expected
        ids += delta.token_ids
        expected += len(delta.token_ids)
    return ids


def usage_of(events: Sequence[pb.GenerateResponse]) -> pb.Usage:
    assert events[-1].HasField("usage")
    return events[-1].usage


def busy(**changes: Any) -> Load:
    return replace(IDLE, **changes)
