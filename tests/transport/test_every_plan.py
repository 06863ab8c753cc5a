"""Every pair of shapes, against what a reader with all the time in the world would write down.

What is sent comes out of the plan, the cutting of sealed runs and the pairs' own chunks; what is
needed is listed cell by cell from the two head maps and the two block sizes.
"""

from collections import Counter
from collections.abc import Iterator

import pytest

from kvcache.head_map import HeadInterval, HeadMap
from kvcache.spec import CacheSpec
from transport.outgoing_pair import OutgoingPair
from transport.plan import pair_plans
from transport.sealed_runs import Run, cut
from transport.shipment import Shape

SIZES = range(1, 10)
GEOMETRIES = [(9, 1), (10, 2), (9, 3), (16, 8)]  # query heads, KV heads
RATIOS = [(1, 1), (1, 2), (2, 1), (1, 4), (4, 1)]  # prefill's block size to decode's
UNIT, LAYERS, WIDTH = 4, 2, 3
NUM_TOKENS, RESIDENT_TOKENS = 45, 16  # a tail of one token; decode holds whole blocks of any size

Cell = tuple[int, int, int, int]  # decode rank, layer, block of the wire, head
Maps = tuple[HeadInterval, ...]


def spec_of(num_kv_heads: int, ratio: int) -> CacheSpec:
    return CacheSpec.full(LAYERS, num_kv_heads, WIDTH, UNIT * ratio, "float32")


def chunks(
    source: Maps, target: Maps, shape: Shape, first_block: int, table: tuple[int, ...]
) -> Iterator[tuple[int, int, OutgoingPair, Run]]:
    """All that every prefill rank sends: (prefill rank, decode rank, pair, run). To every second
    decode rank several layers go as one chunk.
    """
    tail = NUM_TOKENS % (shape.block_size * shape.parts) or None
    for plan in pair_plans(source, target):
        pair = OutgoingPair(
            plan.heads, shape, chunk_bytes=500, most_chunks=plan.decode_rank % 3 + 1
        )
        pair.grant(first_block, window_bytes=1 << 30)
        for layer in range(LAYERS):
            pair.seal(cut(Run(layer, 0, table[:1]), shape))
            pair.seal(cut(Run(layer, 1, table[1:], tail), shape))
        while (part := pair.take()) is not None:
            for run in part.runs:
                yield plan.prefill_rank, plan.decode_rank, pair, run


@pytest.mark.parametrize(("num_query_heads", "num_kv_heads"), GEOMETRIES)
@pytest.mark.parametrize(("theirs", "ours"), RATIOS)
def test_every_cell_that_is_needed_is_sent_once_from_where_its_tokens_lie(
    num_query_heads: int, num_kv_heads: int, theirs: int, ours: int
) -> None:
    shape = Shape.of(spec_of(num_kv_heads, theirs), NUM_TOKENS, UNIT * ours)
    unit = UNIT * min(theirs, ours)
    first, num_blocks = RESIDENT_TOKENS // unit, -(-NUM_TOKENS // unit)
    table = tuple(range(40, 40 - -(-NUM_TOKENS // (UNIT * theirs)), -1))
    cell_bytes = 2 * unit * WIDTH * 4  # K and V
    maps = {tp: HeadMap.even(num_query_heads, num_kv_heads, tp).kv for tp in SIZES}
    for source in maps.values():
        for target in maps.values():
            sent: Counter[Cell] = Counter()
            pairs: dict[tuple[int, int], OutgoingPair] = {}
            for sender, rank, pair, run in chunks(source, target, shape, first, table):
                pairs[sender, rank] = pair
                assert all(head in source[sender] for head in pair.heads)
                for offset, block_id in enumerate(run.block_ids):
                    block = run.first_block + offset
                    start = block * unit  # the block's first token lies here in the pool:
                    place = (table[start // (UNIT * theirs)], start % (UNIT * theirs))
                    parts = theirs // min(theirs, ours)
                    assert (block_id // parts, block_id % parts * unit) == place
                    sent.update((rank, run.layer, block, head) for head in pair.heads)
                last = run.first_block + len(run.block_ids) == num_blocks
                assert run.tail_tokens == ((NUM_TOKENS % unit or None) if last else None)
            num_bytes = sum(pair.bytes_sent for pair in pairs.values())
            needed = {
                (rank, layer, block, head)
                for rank, held in enumerate(target)
                for head in held
                for layer in range(LAYERS)
                for block in range(first, num_blocks)
            }
            assert sent.keys() == needed and set(sent.values()) == {1}
            num_held = sum(len(held) for held in target)
            assert num_bytes == num_held * LAYERS * (num_blocks - first) * cell_bytes


@pytest.mark.parametrize(("num_query_heads", "num_kv_heads"), GEOMETRIES)
def test_of_the_ranks_that_hold_a_head_one_sends_it_to_each_that_needs_it(
    num_query_heads: int, num_kv_heads: int
) -> None:
    maps = {tp: HeadMap.even(num_query_heads, num_kv_heads, tp).kv for tp in SIZES}
    for source in maps.values():
        for target in maps.values():
            senders: dict[tuple[int, int], list[int]] = {}
            for plan in pair_plans(source, target):
                for head in plan.heads:
                    senders.setdefault((plan.decode_rank, head), []).append(plan.prefill_rank)
            wanted = {(rank, head) for rank, held in enumerate(target) for head in held}
            assert senders.keys() == wanted
            assert all(len(ranks) == 1 for ranks in senders.values())
