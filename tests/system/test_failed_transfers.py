"""Transfers that end in the middle: what had come stays, the rest comes again, nothing leaks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
import pytest

from decode_worker.side import DecodeSide
from engine.sampling_params import SamplingParams
from model.checksum_reference import checksum_continuation
from model.config import ChecksumConfig
from model.source import open_model
from protos import worker_pb2 as pb
from protos.transfer_pb2 import Frame, Hello
from tests.system.in_process import (
    DecodeWorker,
    PrefillWorker,
    decode_request,
    decode_worker,
    disaggregated,
    prefill_request,
    prefill_worker,
    work_request,
)
from transport.config import TransportConfig
from transport.fault_wire import FaultConnector, Item
from transport.link import Link, LinkClosed
from transport.loopback_wire import LoopbackWire
from transport.receiver import Receiver
from worker.refusal import Refused

SOURCE = open_model("checksum")
NUM_BLOCKS = 5  # of the prompt: four full ones and a tail
PROMPT = [(i * i * 7 + i) % 256 for i in range(72)]
RIGHT = checksum_continuation(ChecksumConfig(), PROMPT, 9)
GREEDY = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
BOTH_WAYS = pytest.mark.parametrize("tps", [(1, 1), (3, 2), (1, 3)], ids=str)


class Killable:
    """A prefill worker's way to decode, which ends when the worker is killed.

    Until then `limits` says, by decode address, from which block on chunks are lost.
    """

    def __init__(self, wire: LoopbackWire, limits: dict[str, int], lose_seal: bool = True) -> None:
        self._wire = wire
        self._limits = limits
        self._lose_seal = lose_seal
        self._links: list[Link] = []
        self._killed = False

    async def connect(self, address: str, hello: Hello) -> Link:
        if self._killed:
            raise LinkClosed("killed")
        lossy = FaultConnector(self._wire, partial(self._lose, address))
        self._links.append(await lossy.connect(address, hello))
        return self._links[-1]

    async def kill(self) -> None:
        self._killed = True
        for link in self._links:
            await link.close("killed")

    async def _lose(self, address: str, frame: Frame, payload: memoryview | None) -> list[Item]:
        late = frame.HasField("chunk") and frame.chunk.first_block >= self._limits[address]
        return (
            [] if late or (self._lose_seal and frame.HasField("seal_all")) else [(frame, payload)]
        )


@pytest.fixture
def single_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk carries one block of one layer."""
    small = partial(TransportConfig, chunk_bytes=1)
    monkeypatch.setattr("prefill_worker.settings.TransportConfig", small)


async def heard(events: AsyncIterator[Any], into: list[Any]) -> None:
    async for event in events:
        into.append(event)


async def attempt(
    prefill: PrefillWorker, decode: DecodeWorker, killable: Killable, limits: list[int]
) -> tuple[Refused, list[pb.DecodeEvent]]:
    """Both legs, until so many blocks have come to each decode rank and prefill is killed."""
    work = work_request(PROMPT, GREEDY)
    transfer_id = work.request_id.encode()
    assert prefill.prefilling is not None and decode.decoding is not None
    said: list[pb.DecodeEvent] = []
    prefill_leg = asyncio.ensure_future(
        heard(prefill.prefilling.run(prefill_request(work, transfer_id, decode, 16)), [])
    )
    decode_leg = asyncio.ensure_future(
        heard(decode.decoding.run(decode_request(work, transfer_id, prefill)), said)
    )
    async with asyncio.timeout(10):
        while any(
            receiver.counts.bytes < limit * block_bytes(decode, rank)
            for rank, (receiver, limit) in enumerate(zip(receivers(decode), limits, strict=True))
        ) or not any(event.HasField("reserved") for event in said):
            await asyncio.sleep(0.002)
        await killable.kill()
        with pytest.raises(Refused) as refused:
            await decode_leg
        prefill_leg.cancel()
        with suppress(asyncio.CancelledError, Refused):
            await prefill_leg
    return refused.value, said


def receivers(decode: DecodeWorker) -> list[Receiver]:
    return [side.receiver for side in decode.sides if isinstance(side, DecodeSide)]


def block_bytes(decode: DecodeWorker, rank: int) -> int:
    store = decode.parts[rank].store
    return sum(store.layer(layer)[0].nbytes for layer in range(store.num_layers))


async def alone(decode: DecodeWorker) -> tuple[list[int], pb.DecodeDone]:
    """What decode says when it computes the prompt itself, and what it computed for it."""
    assert decode.decoding is not None
    said: list[pb.DecodeEvent] = []
    await heard(decode.decoding.run(decode_request(work_request(PROMPT, GREEDY), b"", None)), said)
    return [event.token.token_id for event in said if event.HasField("token")], said[-1].done


@BOTH_WAYS
@pytest.mark.parametrize("num_came", range(NUM_BLOCKS + 1))
@pytest.mark.parametrize("by", ["another prefill", "decode itself"])
async def test_prefill_killed_after_any_number_of_blocks_costs_only_the_others(
    single_blocks: None, tps: tuple[int, int], num_came: int, by: str
) -> None:
    wire, limits = LoopbackWire(), [num_came] * tps[1]
    places: dict[str, int] = {}
    killable = Killable(wire, places)
    async with (
        prefill_worker(SOURCE, killable, tps[0], num_blocks=16) as prefill,
        prefill_worker(SOURCE, wire, tps[0], num_blocks=16) as other,
        decode_worker(SOURCE, wire, tps[1], num_blocks=16) as decode,
    ):
        places |= dict(zip(decode.addresses, limits, strict=True))
        refused, said = await attempt(prefill, decode, killable, limits)
        kept = min(num_came, 4)  # the tail is not full, and has no name
        assert refused.code is grpc.StatusCode.UNAVAILABLE
        assert said[-1].kept.blocks == kept
        await decode.settled()
        await prefill.settled()
        assert decode.engine.books().cached_blocks == kept
        if by == "another prefill":
            answer = await disaggregated(other, decode, PROMPT, GREEDY)
            assert answer.tokens == [RIGHT]
            assert (answer.decode_cached_blocks, answer.shipped_blocks) == (kept, NUM_BLOCKS - kept)
        else:
            tokens, done = await alone(decode)
            assert tokens == RIGHT
            assert (done.cached_tokens, done.computed_tokens) == (16 * kept, 72 - 16 * kept)
        await decode.settled()
        await other.settled()


async def test_a_block_is_kept_only_when_every_rank_has_it(single_blocks: None) -> None:
    wire, limits, places = LoopbackWire(), [4, 1, 3], dict[str, int]()
    killable = Killable(wire, places)
    async with (
        prefill_worker(SOURCE, killable, num_blocks=16) as prefill,
        decode_worker(SOURCE, wire, 3, num_blocks=16) as decode,
    ):
        places |= dict(zip(decode.addresses, limits, strict=True))
        _, said = await attempt(prefill, decode, killable, limits)
        assert said[-1].kept.blocks == 1
        await decode.settled()
        assert (await alone(decode))[0] == RIGHT
        await prefill.settled()


async def test_prefill_killed_after_sealing_changes_nothing() -> None:
    """Decode has every cell and the first token; nobody is asked for anything again."""
    wire, places = LoopbackWire(), dict[str, int]()
    killable = Killable(wire, places, lose_seal=False)
    async with (
        prefill_worker(SOURCE, killable, num_blocks=16) as prefill,
        decode_worker(SOURCE, wire, num_blocks=16) as decode,
    ):
        places |= dict.fromkeys(decode.addresses, NUM_BLOCKS)
        work = work_request(PROMPT, GREEDY)
        assert prefill.prefilling is not None and decode.decoding is not None
        sent = heard(prefill.prefilling.run(prefill_request(work, b"sealed", decode)), [])
        prefill_leg = asyncio.ensure_future(sent)
        tokens: list[int] = []
        async for event in decode.decoding.run(decode_request(work, b"sealed", prefill)):
            if event.HasField("adopted"):
                await killable.kill()
                prefill_leg.cancel()
            elif event.HasField("token"):
                tokens.append(event.token.token_id)
        assert tokens == RIGHT
        await asyncio.wait([prefill_leg])
        await decode.settled()
        await prefill.settled()


async def test_a_decode_that_dies_in_mid_transfer_frees_prefill_at_once(
    single_blocks: None,
) -> None:
    wire, places = LoopbackWire(), dict[str, int]()
    async with (
        prefill_worker(SOURCE, Killable(wire, places), num_blocks=16) as prefill,
        decode_worker(SOURCE, wire, num_blocks=16) as decode,
    ):
        places |= dict.fromkeys(decode.addresses, 2)
        work = work_request(PROMPT, GREEDY)
        assert prefill.prefilling is not None and decode.decoding is not None
        sent = heard(prefill.prefilling.run(prefill_request(work, b"dies", decode)), [])
        received = heard(decode.decoding.run(decode_request(work, b"dies", prefill)), [])
        legs = [asyncio.ensure_future(sent), asyncio.ensure_future(received)]
        async with asyncio.timeout(5):
            while receivers(decode)[0].counts.bytes < 2 * block_bytes(decode, 0):
                await asyncio.sleep(0.002)
        wire.silence(decode.addresses[0])
        async with asyncio.timeout(0.5):
            ends = await asyncio.gather(*legs, return_exceptions=True)
            await prefill.settled()
        assert [end.code for end in ends if isinstance(end, Refused)] == [
            grpc.StatusCode.UNAVAILABLE
        ] * 2
        await decode.settled()


async def test_a_full_local_hit_ships_nothing_and_still_releases_prefill() -> None:
    wire = LoopbackWire()
    async with (
        prefill_worker(SOURCE, wire, num_blocks=16) as prefill,
        decode_worker(SOURCE, wire, num_blocks=16) as decode,
    ):
        prompt = PROMPT[:64]
        for shipped in (4, 0):
            answer = await disaggregated(prefill, decode, prompt, GREEDY)
            assert answer.tokens == [checksum_continuation(ChecksumConfig(), prompt, 9)]
            assert answer.shipped_blocks == shipped
            await prefill.settled()
            await decode.settled()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "seed": 11},
        {"temperature": 0.8, "seed": 3, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.5, "seed": 5, "repetition_penalty": 1.7, "min_tokens": 4},
        {"temperature": 2.0, "seed": 8, "presence_penalty": 1.5, "frequency_penalty": 1.1},
        {"temperature": 0.0, "frequency_penalty": 2.0, "presence_penalty": 2.0},
    ],
    ids=["seed", "filters", "repetition", "penalties", "greedy"],
)
async def test_sampling_goes_on_behind_the_handover_as_if_there_had_been_none(
    n: int, sampling: dict[str, Any]
) -> None:
    wire = LoopbackWire()
    params = SamplingParams(max_tokens=12, n=n, ignore_eos=True, **sampling)
    async with (
        prefill_worker(SOURCE, wire, num_blocks=32) as prefill,
        decode_worker(SOURCE, wire, num_blocks=32) as decode,
        decode_worker(SOURCE, wire, num_blocks=32) as single,
    ):
        answer = await disaggregated(prefill, decode, PROMPT, params)
        assert single.decoding is not None
        tokens: list[list[int]] = [[] for _ in range(n)]
        work = work_request(PROMPT, params)
        async for event in single.decoding.run(decode_request(work, b"", None)):
            if event.HasField("token"):
                tokens[event.token.choice].append(event.token.token_id)
        assert answer.tokens == tokens


async def test_20_requests_through_a_pool_for_little_more_than_one_all_end_and_all_are_right() -> (
    None
):
    """7 blocks a request, 8 in decode's pool: who has begun can end, and somebody always moves."""
    wire = LoopbackWire()
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    prompts = [[(seed * 31 + i * i * 7) % 256 for i in range(64)] for seed in range(20)]
    async with (
        prefill_worker(SOURCE, wire, num_blocks=120) as prefill,
        decode_worker(SOURCE, wire, num_blocks=8, reserve_wait_s=60.0) as decode,
    ):
        async with asyncio.timeout(60):
            answers = await asyncio.gather(
                *(disaggregated(prefill, decode, prompt, params) for prompt in prompts)
            )
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == [checksum_continuation(ChecksumConfig(), prompt, 40)]
        await decode.settled()
        await prefill.settled()
