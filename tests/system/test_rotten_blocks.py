"""A byte of a cached block changes, on either worker and any rank: nobody gets a token of it."""

import asyncio
from collections.abc import Sequence

import grpc
import pytest

from engine.sampling_params import SamplingParams
from kvcache.block_hash import PUBLIC, name_blocks
from kvcache.kv_store import KvStore
from kvcache.ledger_row import Reason
from model.checksum_reference import checksum_continuation
from model.config import ChecksumConfig
from model.source import open_model
from prefill_worker.ranks import LocalRank
from tests.system.in_process import (
    Worker,
    decode_worker,
    disaggregated,
    prefill_worker,
)
from transport.loopback_wire import LoopbackWire
from transport.orders import ShipmentKey, ShipmentReport
from worker.refusal import Refused

SOURCE = open_model("checksum")
PROMPT = [(i * i * 3 + i) % 256 for i in range(72)]  # four full blocks and a tail
RIGHT = checksum_continuation(ChecksumConfig(), PROMPT, 9)
GREEDY = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
NAMES = name_blocks(SOURCE.namespace("float32"), PUBLIC, PROMPT, 16)


def damage(worker: Worker, number: int, rank: int) -> None:
    """Flip one bit of the prompt's block of that number, as one rank holds it."""
    held = worker.engine.pin(NAMES)
    store = worker.parts[rank].store
    store.layer(1)[held[NAMES[number]], 1, -1, 4, 0] ^= 1 << 33
    worker.engine.unpin(list(held.values()))


def rotten_rows(worker: Worker) -> int:
    rows = worker.ledgers[0].extract().rows
    return int(rows["count"][rows["reason"] == Reason.ROTTEN].sum())


PAIRS_AND_RANKS = [((1, 1), 0), ((2, 3), 0), ((2, 3), 1), ((3, 3), 2), ((3, 2), 1)]


@pytest.mark.parametrize(("tps", "rank"), PAIRS_AND_RANKS, ids=str)
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_changed_block_on_any_rank_is_dropped_by_all_and_gives_no_token(
    side: str, tps: tuple[int, int], rank: int
) -> None:
    wire = LoopbackWire()
    async with (
        prefill_worker(SOURCE, wire, tps[0], num_blocks=16, recheck_share=1.0) as prefill,
        decode_worker(SOURCE, wire, tps[1], num_blocks=16, recheck_share=1.0) as decode,
    ):
        assert (await disaggregated(prefill, decode, PROMPT, GREEDY)).tokens == [RIGHT]
        await decode.settled()
        await prefill.settled()
        broken = prefill if side == "prefill" else decode
        damage(broken, 2, min(rank, len(broken.parts) - 1))
        if side == "prefill":
            decode.engine.flush_cache()  # it must be shipped again
        answer = await disaggregated(prefill, decode, PROMPT, GREEDY)
        assert answer.tokens == [RIGHT]
        if side == "prefill":
            assert answer.cached_tokens == 32
        else:
            assert (answer.decode_cached_blocks, answer.shipped_blocks) == (2, 3)
        assert broken.engine.stats().rotten_blocks == 1
        assert rotten_rows(broken) == 1
        await decode.settled()
        await prefill.settled()


async def test_every_full_block_that_is_shipped_was_digested_by_the_layer_that_filled_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted: dict[int, list[int]] = {}
    note_cells = KvStore.note_cells

    def note(store: KvStore, layer: int, block_ids: Sequence[int]) -> None:
        assert (
            store.kept.known(range(layer, layer + 1), block_ids, range(len(store.kv_heads))) is None
        )
        note_cells(store, layer, block_ids)
        noted.setdefault(layer, []).extend(block_ids)

    monkeypatch.setattr(KvStore, "note_cells", note)
    wire = LoopbackWire()
    async with (
        prefill_worker(SOURCE, wire, 1, num_blocks=16) as prefill,
        decode_worker(SOURCE, wire, 1, num_blocks=16) as decode,
    ):
        assert (await disaggregated(prefill, decode, PROMPT, GREEDY)).tokens == [RIGHT]
        held = prefill.engine.pin(NAMES)
        prefill.engine.unpin(list(held.values()))
        full = [held[name] for name in NAMES]
        assert noted == dict.fromkeys(range(prefill.parts[0].store.num_layers), full)
        await decode.settled()
        await prefill.settled()


async def report_late(self: LocalRank, key: ShipmentKey) -> ShipmentReport:
    """Decode's abort is the quicker: nobody waits any more when this rank would say why."""
    _, task = self._shipments[key]
    await asyncio.wait([task])
    if task.exception() is not None:
        await asyncio.Event().wait()
    self._shipments.pop(key)
    return task.result()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("tps", "rank"), [((1, 2), 0), ((3, 2), 1)], ids=str)
async def test_a_changed_block_is_never_shipped_even_where_none_are_sampled(
    tps: tuple[int, int], rank: int, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever gathers a block to send it makes its digests anyway, and compares. One attempt fails,
    whichever worker is the first to say so, and the next one finds the block dropped.
    """
    wire = LoopbackWire()
    if late:
        monkeypatch.setattr(LocalRank, "shipped", report_late)
    async with (
        prefill_worker(SOURCE, wire, tps[0], num_blocks=16, recheck_share=0.0) as prefill,
        decode_worker(SOURCE, wire, tps[1], num_blocks=16) as decode,
    ):
        assert (await disaggregated(prefill, decode, PROMPT, GREEDY)).tokens == [RIGHT]
        await decode.settled()
        await prefill.settled()
        damage(prefill, 1, rank)
        decode.engine.flush_cache()
        with pytest.raises(Refused, match="have changed in layer 1") as refused:
            await disaggregated(prefill, decode, PROMPT, GREEDY)
        assert refused.value.code is grpc.StatusCode.DATA_LOSS
        answer = await disaggregated(prefill, decode, PROMPT, GREEDY)
        assert (answer.tokens, answer.cached_tokens) == ([RIGHT], 16)
        assert prefill.engine.stats().rotten_blocks == 1
        await decode.settled()
        await prefill.settled()
