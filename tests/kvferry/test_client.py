import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from rich.console import Console

from kvferry.client import RouterClient, chat_request
from kvferry.errors import CommandError, NoCluster
from kvferry.explain import explain_table, size
from kvferry.talk import Door, Manner, ask_once
from protos.inference_pb2 import (
    Candidate,
    ChatMessage,
    Delta,
    Explanation,
    Finished,
    GenerateRequest,
    GenerateResponse,
    Journey,
    Started,
    Usage,
)
from protos.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server

EXPLANATION = Explanation(
    prompt_tokens=40,
    prompt_blocks=2,
    chosen_prefill="prefill-1",
    chosen_decode="decode-0",
    reason="holds 2 of 2 blocks",
    candidates=[
        Candidate(
            prefill="prefill-1",
            decode="decode-0",
            cost_ms=12.5,
            terms_ms={"compute": 12.5},
            prefill_matched_blocks=2,
            prefill_matched_tokens=32,
        ),
        Candidate(decode="decode-0", cost_ms=90.0, terms_ms={"compute": 80.0, "queue": 10.0}),
        Candidate(prefill="prefill-0", decode="decode-0", refused="num_layers differs"),
    ],
)
JOURNEY = Journey(
    prefill="prefill-1",
    decode="decode-0",
    wire="gloo",
    prompt_blocks=3,
    prefill_cached_blocks=2,
    decode_cached_blocks=1,
    computed_tokens=8,
    shipped_blocks=2,
    shipped_bytes=3 << 20,
    transfer_ms=6.0,
    ttft_ms=44.0,
    tpot_ms=11.0,
    attempts=1,
)


class FakeRouter(InferenceServicer):
    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.metadata: dict[str, str] = {}

    async def Generate(
        self, request: GenerateRequest, context: Any
    ) -> AsyncIterator[GenerateResponse]:
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata())
        if not request.chat.messages[-1].content:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "messages: the prompt is empty, at least 1 token"
            )
        started = Started(request_id="r", explanation=EXPLANATION if request.explain else None)
        yield GenerateResponse(started=started)
        for piece in ("Paris", " [bold]is[/] it"):
            yield GenerateResponse(delta=Delta(text=piece))
        yield GenerateResponse(finished=Finished(reason="stop"))
        usage = Usage(prompt_tokens=40, completion_tokens=9, cached_tokens=32, journey=JOURNEY)
        yield GenerateResponse(usage=usage)


@asynccontextmanager
async def fake_router() -> AsyncIterator[tuple[FakeRouter, str]]:
    router = FakeRouter()
    server = grpc.aio.server()
    add_InferenceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield router, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def question(text: str, *, explain: bool = False) -> GenerateRequest:
    messages = [ChatMessage(role="user", content=text)]
    return chat_request(messages, max_tokens=9, temperature=0.0, explain=explain)


async def test_an_answer_is_streamed_piece_by_piece_and_kept_whole() -> None:
    pieces: list[str] = []
    async with fake_router() as (_, address), RouterClient(address) as client:
        answer = await client.ask(question("capital of France?", explain=True), pieces.append)
    assert pieces == ["Paris", " [bold]is[/] it"]
    assert answer.text == "Paris [bold]is[/] it"
    assert answer.finish_reason == "stop"
    assert answer.usage.cached_tokens == 32
    assert answer.explanation == EXPLANATION


async def test_a_refusal_becomes_one_sentence_with_its_code() -> None:
    async with fake_router() as (_, address), RouterClient(address) as client:
        with pytest.raises(CommandError, match="INVALID_ARGUMENT: messages: the prompt is empty"):
            await client.ask(question(""), lambda text: None)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:1", "nobody answers at its address"),
        ("no-such-host.invalid:50051", "its address is not known"),
    ],
)
async def test_a_router_that_does_not_answer_is_named_by_its_address(
    address: str, why: str
) -> None:
    async with RouterClient(address) as client:
        with pytest.raises(NoCluster) as failure:
            await client.ask(question("?"), lambda text: None)
    assert str(failure.value) == (
        f"no router answers at {address} ({why}): start a cluster with `kvferry up`, or name "
        "another router with --grpc HOST:PORT"
    )


async def test_ask_prints_the_text_as_it_is_and_the_tables_when_wanted() -> None:
    console = Console(record=True, width=160, file=io.StringIO())
    async with fake_router() as (router, address):
        manner = Manner(max_tokens=9, temperature=0.5, seed=7, explain=True)
        await ask_once(Door(address), "capital of France?", "Be brief.", manner, console)
    (request,) = router.requests
    assert [message.role for message in request.chat.messages] == ["system", "user"]
    assert request.sampling.seed == 7
    assert request.sampling.temperature == 0.5
    shown = console.export_text()
    assert shown.startswith("Paris [bold]is[/] it\n")
    assert "prefill-1 -> decode-0 over gloo" in shown
    assert "3 blocks" in shown
    assert "2 blocks on prefill, 1 on decode" in shown
    assert "8 prompt tokens, 32 reused" in shown
    assert "2 blocks, 3.0 MiB in 6 ms" in shown
    assert "44 ms" in shown
    assert "11.0 ms, 9 tokens" in shown


async def test_the_tables_say_why_each_pair_was_taken_passed_over_or_refused() -> None:
    async with fake_router() as (_, address), RouterClient(address) as client:
        answer = await client.ask(question("why?", explain=True), lambda text: None)
    console = Console(record=True, width=160, file=io.StringIO())
    console.print(explain_table(answer))
    shown = console.export_text()
    assert "holds 2 of 2 blocks" in shown
    assert "compute 80.0 + queue 10.0" in shown
    assert "num_layers differs" in shown
    assert "decode-0 alone" in shown


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 20, "5.0 MiB"), (3 << 30, "3.0 GiB")],
)
def test_sizes_are_in_powers_of_1024(num_bytes: int, shown: str) -> None:
    assert size(num_bytes) == shown


async def test_the_key_travels_with_the_call() -> None:
    async with fake_router() as (router, address), RouterClient(address, "k3y") as client:
        await client.ask(question("hello"), lambda text: None)
    assert router.metadata["authorization"] == "Bearer k3y"
