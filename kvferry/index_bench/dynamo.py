"""Dynamo's index at the same work, as JSON. Runs in a Python of its own, and imports nothing here.

`dynamo.py chains` holds chains of 64 to 512 blocks: rates of matches of 64 blocks, alone and with
events. `dynamo.py prompts WORKERS BLOCKS` holds prompts of 512 blocks, each at one worker in turn:
milliseconds to name 8,192 tokens, and to find who holds the longest prefix of them.
"""

import json
import random
import sys
import time
from typing import Any

BLOCKS, WORKERS, RUNS, MATCHES = 1_000_000, 64, 3, 2000
BLOCK_SIZE, PROMPT_BLOCKS, PROMPTS, PROMPT_RUNS = 16, 512, 200, 5


def stored(names: list[int]) -> bytes:
    blocks = [{"block_hash": name, "tokens_hash": name} for name in names]
    return json.dumps(
        {"event_id": 1, "data": {"stored": {"parent_hash": None, "blocks": blocks}}}
    ).encode()


def removed(names: list[int]) -> bytes:
    return json.dumps({"event_id": 1, "data": {"removed": {"block_hashes": names}}}).encode()


def chains() -> dict[str, list[float]]:
    from dynamo._core import RadixTree  # type: ignore[import-not-found]

    rng, tree = random.Random(1), RadixTree()
    held: list[list[int]] = []
    holders: list[int] = []
    count = 0
    while count < BLOCKS:
        names = [rng.getrandbits(63) for _ in range(rng.randrange(64, 513))]
        held.append(names)
        count += len(names)
        for _ in range(1 + (rng.random() < 0.5)):
            holder = rng.randrange(WORKERS)
            tree.apply_event(holder, stored(names))
        holders.append(holder)
    assert max(tree.find_matches(held[0]).scores.values()) == len(held[0])
    found: dict[str, list[float]] = {"match": [], "mixed": []}
    for _ in range(RUNS):
        asked = [rng.choice(held)[:64] for _ in range(MATCHES)]
        found["match"].append(rate(tree, asked, []))
        packed = []
        for _ in range(MATCHES // 20):
            at = rng.randrange(len(held))
            names = held[at]
            packed.append((holders[at], removed(names[::-1]), stored(names)))
        found["mixed"].append(rate(tree, asked, packed))
    return found


def rate(tree: Any, asked: list[list[int]], packed: list[tuple[int, bytes, bytes]]) -> float:
    """Thousands a second; every twentieth match a chain goes and comes back."""
    began = time.perf_counter()
    for number, names in enumerate(asked):
        tree.find_matches(names).scores  # noqa: B018
        if packed and number % 20 == 0:
            worker, gone, back = packed[number // 20]
            tree.apply_event(worker, gone)
            tree.apply_event(worker, back)
    return len(asked) / (time.perf_counter() - began) / 1e3


def prompts(num_workers: int, num_blocks: int) -> dict[str, list[list[float]]]:
    from dynamo._core import RadixTree, compute_block_hash_for_seq

    rng, tree = random.Random(1), RadixTree()
    asked: list[list[int]] = []
    for number in range(-(-num_blocks // PROMPT_BLOCKS)):
        names = [rng.getrandbits(63) for _ in range(PROMPT_BLOCKS)]
        tree.apply_event(number % num_workers, stored(names))
        if number < PROMPTS:
            asked.append(names)
    assert all(max(tree.find_matches(each).scores.values()) == PROMPT_BLOCKS for each in asked)
    tokens = [[rng.randrange(49_152) for _ in range(PROMPT_BLOCKS * BLOCK_SIZE)] for _ in asked]
    found: dict[str, list[list[float]]] = {"naming": [], "longest": []}
    for _ in range(PROMPT_RUNS):
        found["naming"].append(
            [timed(lambda ids=ids: compute_block_hash_for_seq(ids, BLOCK_SIZE)) for ids in tokens]
        )
        found["longest"].append(
            [timed(lambda names=names: tree.find_matches(names).scores) for names in asked]
        )
    return found


def timed(work: Any) -> float:
    """Milliseconds."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    if sys.argv[1] == "prompts":
        json.dump(prompts(int(sys.argv[2]), int(sys.argv[3])), sys.stdout)
    else:
        json.dump(chains(), sys.stdout)


if __name__ == "__main__":
    main()
