import random
import time
from functools import partial

import numpy as np
import pytest

from kvcache.head_map import HeadMap
from model.checksum import ChecksumModel, ReplicasDisagree
from model.checksum_reference import checksum_continuation, checksum_logits, checksum_next_token
from model.comm import Comm
from model.config import ChecksumConfig
from tests.model.paged_run import PagedRun

CONFIG = ChecksumConfig()
GOLDEN = [462, 510, 435, 76, 40, 162, 80, 83]


def make(
    head_map: HeadMap, comm: Comm, config: ChecksumConfig = CONFIG, block_size: int = 16
) -> ChecksumModel:
    return ChecksumModel(config, head_map, comm, block_size)


def run(tp: int = 1, config: ChecksumConfig = CONFIG, block_size: int = 16) -> PagedRun:
    head_map = HeadMap.even(config.num_query_heads, config.num_kv_heads, tp)
    return PagedRun(partial(make, config=config, block_size=block_size), head_map)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(CONFIG.vocab_size), k=length)


def test_its_tokens_are_the_same_in_every_release() -> None:
    assert checksum_continuation(CONFIG, [72, 101, 108, 108, 111], 8) == GOLDEN


def test_the_continuation_repeats_the_next_token() -> None:
    tokens = prompt(40)
    for token in checksum_continuation(CONFIG, tokens, 5):
        assert checksum_next_token(CONFIG, tokens) == token
        tokens.append(token)


@pytest.mark.parametrize("tp", range(1, 10))
def test_every_tensor_parallel_size_gives_the_reference(tp: int) -> None:
    tokens = prompt(37)
    paged = run(tp)
    expected = [checksum_logits(CONFIG, tokens[: n + 1]) for n in range(37)]
    assert np.array_equal(paged.prefill("a", tokens, chunk=11).numpy(), np.stack(expected))
    assert paged.greedy("b", tokens, 6) == checksum_continuation(CONFIG, tokens, 6)


@pytest.mark.parametrize("block_size", [1, 8, 64])
@pytest.mark.parametrize("chunk", [1, 5, 16, 64, None])
def test_chunks_and_block_sizes_do_not_change_it(chunk: int | None, block_size: int) -> None:
    tokens = prompt(50)
    logits = run(block_size=block_size).prefill("a", tokens, chunk)
    assert np.array_equal(logits[-1].numpy(), checksum_logits(CONFIG, tokens))


def test_batch_neighbours_do_not_change_it() -> None:
    prompts = {name: prompt(length, length) for name, length in [("a", 3), ("b", 40), ("c", 17)]}
    paged = run(tp=2)
    paged.step({"b": prompts["b"][:20]})
    paged.step({"a": prompts["a"], "b": prompts["b"][20:33], "c": prompts["c"][:16]})
    logits = paged.step({"c": prompts["c"][16:], "a": [5], "b": prompts["b"][33:]})
    expected = [prompts["c"], [*prompts["a"], 5], prompts["b"]]
    assert np.array_equal(logits, np.stack([checksum_logits(CONFIG, p) for p in expected]))


def test_layers_are_announced_in_order_once_a_step() -> None:
    paged = run()
    paged.prefill("a", prompt(20), chunk=10)
    assert paged.layers_seen == [0, 1, 2, 3, 0, 1, 2, 3]


def test_the_weights_id_changes_everything() -> None:
    other = ChecksumConfig(weights_id=1)
    assert CONFIG.digest() != other.digest()
    assert not np.isclose(checksum_logits(CONFIG, [1, 2]), checksum_logits(other, [1, 2])).all()


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("position", [0, 15, 16, 30, 39])
def test_any_flipped_bit_of_any_cell_changes_the_output(layer: int, position: int) -> None:
    tokens = prompt(41)
    paged = run()
    paged.prefill("a", tokens[:40])
    pool = paged.stores[0].layer(layer)
    block = paged.tables["a"][position // 16]
    for plane, head, column in [(0, 0, 0), (0, 2, 3), (1, 1, 0), (1, 2, 2)]:
        for bit in (1, 1 << 40, -(1 << 63)):
            pool[block, plane, head, position % 16, column] ^= bit
            paged.lengths["a"] = 40
            logits = paged.step({"a": tokens[40:]})[0].numpy()
            assert not np.array_equal(logits, checksum_logits(CONFIG, tokens))
            pool[block, plane, head, position % 16, column] ^= bit
    paged.lengths["a"] = 40
    logits = paged.step({"a": tokens[40:]})[0].numpy()
    assert np.array_equal(logits, checksum_logits(CONFIG, tokens))


def changed_by(change: str, tp: int = 1) -> bool:
    """Whether the next logits differ once the store of a 40-token sequence has been disturbed."""
    tokens = prompt(41)
    paged = run(tp)
    paged.step({"a": tokens[:40], "b": prompt(40, seed=1), "c": [9, *tokens[1:40]]})
    pools = [paged.stores[0].layer(layer) for layer in range(4)]
    first, second, _ = paged.tables["a"]
    if change == "swapped blocks":
        paged.tables["a"][:2] = second, first
    elif change == "foreign block":
        paged.tables["a"][1] = paged.tables["b"][1]
    elif change == "same tokens behind another prefix":
        paged.tables["a"][1] = paged.tables["c"][1]
    elif change == "swapped heads":
        pools[2][second, :, [0, 1]] = pools[2][second, :, [1, 0]]
    elif change == "swapped layers":
        pools[1][second], pools[3][second] = pools[3][second].clone(), pools[1][second].clone()
    elif change == "swapped planes":
        pools[1][second, [0, 1]] = pools[1][second, [1, 0]]
    elif change == "swapped tokens":
        pools[1][second, :, :, [3, 4]] = pools[1][second, :, :, [4, 3]]
    elif change == "half a cell missing":
        pools[3][first, 1, 2, 8:] = 0
    logits = paged.step({"a": tokens[40:]})[0].numpy()
    return not np.array_equal(logits, checksum_logits(CONFIG, tokens))


def test_undisturbed_blocks_change_nothing() -> None:
    assert not changed_by("nothing")


@pytest.mark.parametrize(
    "change",
    [
        "swapped blocks",
        "foreign block",
        "same tokens behind another prefix",
        "swapped heads",
        "swapped layers",
        "swapped planes",
        "swapped tokens",
        "half a cell missing",
    ],
)
def test_no_disturbance_goes_unseen(change: str) -> None:
    assert changed_by(change)


def test_replicas_of_a_head_that_differ_are_reported() -> None:
    paged = run(tp=9)
    tokens = prompt(20)
    paged.prefill("a", tokens)
    paged.stores[4].layer(2)[paged.tables["a"][0], 1, 0, 3, 1] += 1
    with pytest.raises(
        ReplicasDisagree, match="ranks 3 and 4 hold different bytes of KV head 1, layer 2"
    ):
        paged.step({"a": [1]})


def test_logits_of_no_rows_are_an_empty_table() -> None:
    paged = run()
    assert paged.step({"a": [1, 2, 3]}, rows=[]).shape == (0, CONFIG.vocab_size)
    logits = paged.step({"a": [4]})[0].numpy()
    assert np.array_equal(logits, checksum_logits(CONFIG, [1, 2, 3, 4]))


def test_a_batch_of_short_requests_takes_milliseconds() -> None:
    paged = PagedRun(make, HeadMap.even(9, 3, 1), num_blocks=512)
    for name in range(32):
        paged.step({str(name): prompt(100)})
    started = time.perf_counter()
    for _ in range(10):
        paged.step({str(name): [1] for name in range(32)})
    assert (time.perf_counter() - started) / 10 < 0.1
