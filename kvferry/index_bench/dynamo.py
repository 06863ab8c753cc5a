"""Dynamo's index over the same kind of chains: rates as JSON. Runs in a Python of its own."""

import json
import random
import sys
import time
from typing import Any

BLOCKS, WORKERS, RUNS, MATCHES = 1_000_000, 64, 3, 2000


def stored(names: list[int]) -> bytes:
    blocks = [{"block_hash": name, "tokens_hash": name} for name in names]
    return json.dumps(
        {"event_id": 1, "data": {"stored": {"parent_hash": None, "blocks": blocks}}}
    ).encode()


def removed(names: list[int]) -> bytes:
    return json.dumps({"event_id": 1, "data": {"removed": {"block_hashes": names}}}).encode()


def main() -> None:
    from dynamo.llm import RadixTree  # type: ignore[import-not-found]

    rng, tree = random.Random(1), RadixTree()
    chains: list[list[int]] = []
    holders: list[int] = []
    count = 0
    while count < BLOCKS:
        names = [rng.getrandbits(63) for _ in range(rng.randrange(64, 513))]
        chains.append(names)
        count += len(names)
        for _ in range(1 + (rng.random() < 0.5)):
            holder = rng.randrange(WORKERS)
            tree.apply_event(holder, stored(names))
        holders.append(holder)
    assert max(tree.find_matches(chains[0]).scores.values()) == len(chains[0])
    found: dict[str, list[float]] = {"match": [], "mixed": []}
    for _ in range(RUNS):
        asked = [rng.choice(chains)[:64] for _ in range(MATCHES)]
        found["match"].append(rate(tree, asked, []))
        packed = []
        for _ in range(MATCHES // 20):
            at = rng.randrange(len(chains))
            names = chains[at]
            packed.append((holders[at], removed(names[::-1]), stored(names)))
        found["mixed"].append(rate(tree, asked, packed))
    json.dump(found, sys.stdout)


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


if __name__ == "__main__":
    main()
