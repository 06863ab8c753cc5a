"""What other people's programs see: the openai SDK, plain curl, a client made by reflection."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator

import grpc.aio
import httpx
import openai
import pytest
import pytest_asyncio
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from openai.types.chat import ChatCompletionMessageParam

from model.checksum_reference import checksum_continuation
from model.config import ChecksumConfig
from tests.system.live_cluster import LiveCluster, live_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

PROMPT = list(range(64))
FRANCE: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Where is Paris?"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LiveCluster]:
    async with live_cluster(
        tmp_path_factory.mktemp("cluster"),
        "checksum",
        prefill={"p0": {"num_blocks": 128}},
        decode={"d0": {"tp": 2, "num_blocks": 128}},
    ) as cluster:
        yield cluster


def sdk(cluster: LiveCluster) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{cluster.http_url}/v1", api_key="none", max_retries=0)


async def test_the_openai_sdk_completes_streams_and_counts_cached_tokens(
    cluster: LiveCluster,
) -> None:
    async with sdk(cluster) as client:
        assert [model.id async for model in client.models.list()] == ["checksum"]
        for cached in (0, 48):
            done = await client.completions.create(
                model="checksum",
                prompt=PROMPT,
                max_tokens=5,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            assert done.usage is not None and done.usage.prompt_tokens_details is not None
            assert done.usage.prompt_tokens_details.cached_tokens == cached
            assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (64, 5)
        stream = await client.chat.completions.create(
            model="checksum",
            messages=FRANCE,
            max_completion_tokens=6,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        whole = await client.chat.completions.create(
            model="checksum", messages=FRANCE, max_completion_tokens=6, temperature=0
        )
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content


async def test_the_openai_sdk_raises_its_own_errors(cluster: LiveCluster) -> None:
    async with sdk(cluster) as client:
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.completions.create(model="checksum", prompt="hi", temperature=-1)
        with pytest.raises(openai.NotFoundError, match="gpt-9"):
            await client.completions.create(model="gpt-9", prompt="hi")


async def test_plain_http_is_enough(cluster: LiveCluster) -> None:
    body = {"model": "checksum", "prompt": PROMPT, "max_tokens": 3, "temperature": 0}
    url = f"{cluster.http_url}/v1/completions"
    if shutil.which("curl"):
        curl = await asyncio.create_subprocess_exec(
            *("curl", "-sS", url, "-H", "content-type: application/json", "-d", json.dumps(body)),
            stdout=asyncio.subprocess.PIPE,
        )
        answer = json.loads((await curl.communicate())[0])
        assert answer["usage"]["completion_tokens"] == 3
    async with httpx.AsyncClient(base_url=cluster.http_url) as client:
        assert (await client.post(url, json=body)).json()["usage"]["completion_tokens"] == 3
        ids = (await client.post("/tokenize", json={"model": "checksum", "prompt": "hi"})).json()
        assert ids["tokens"] == [104, 105]
        assert (await client.get("/health")).status_code == 200
        assert "vllm:" in (await client.get("/metrics")).text


async def test_a_client_that_knows_only_reflection_can_generate(cluster: LiveCluster) -> None:
    """As grpcurl does: ask for the descriptors, build the messages, call."""
    async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
        pool = await _reflected(channel, "kvferry.v1.Inference")
        service = pool.FindServiceByName("kvferry.v1.Inference")
        method = service.FindMethodByName("Generate")
        request = message_factory.GetMessageClass(method.input_type)()
        sampling = {"maxTokens": 4, "temperature": 0, "ignoreEos": True}
        json_format.ParseDict(
            {"tokenIds": {"ids": PROMPT}, "sampling": sampling}, request, descriptor_pool=pool
        )
        response = message_factory.GetMessageClass(method.output_type)
        call = channel.unary_stream(
            "/kvferry.v1.Inference/Generate",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response.FromString,
        )
        answers = [json_format.MessageToDict(answer) async for answer in call(request, timeout=30)]
        tokens = [t for answer in answers for t in answer.get("delta", {}).get("tokenIds", [])]
        assert tokens == checksum_continuation(ChecksumConfig(), PROMPT, 4)
        health = health_pb2_grpc.HealthStub(channel)
        for service_name in ("", "liveness", "readiness", "kvferry.v1.Inference"):
            state = await health.Check(health_pb2.HealthCheckRequest(service=service_name))
            assert state.status == health_pb2.HealthCheckResponse.SERVING


async def _reflected(channel: grpc.aio.Channel, symbol: str) -> descriptor_pool.DescriptorPool:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)
    pool = descriptor_pool.DescriptorPool()
    async for answer in stub.ServerReflectionInfo(iter([request])):
        files = {}
        for text in answer.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(text)
            files[file.name] = file
        _add(pool, files, next(iter(files)))
        for name in files:
            _add(pool, files, name)
        break
    return pool


def _add(
    pool: descriptor_pool.DescriptorPool,
    files: dict[str, descriptor_pb2.FileDescriptorProto],
    name: str,
) -> None:
    try:
        pool.FindFileByName(name)
    except KeyError:
        for needed in files[name].dependency:
            _add(pool, files, needed)
        pool.Add(files[name])
