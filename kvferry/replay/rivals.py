"""Ways to choose a replica, ours among them. Each names a prefill replica; the real policy does the
rest: it is asked with that replica pinned, and unpinned where the choice is its own.

    ours           the router's policy
    round-robin    one after the other
    least-loaded   the shortest queue
    random         any
    first-block    by the hash of the prompt's first block
    most-cached    whoever holds most of it, the shorter queue among equals
    shared-cache   least-loaded over one cache as large as all together: what reuse could give
    infinite-cache the same over a cache without end: what no router can exceed
"""

import random
from collections.abc import Callable, Sequence
from enum import Enum
from hashlib import blake2b

from kvferry.errors import CommandError
from router.ways import Replica

Pick = Callable[[Sequence[Replica], Sequence[bytes]], str]


class Policy(Enum):
    OURS = "ours"
    ROUND_ROBIN = "round-robin"
    LEAST_LOADED = "least-loaded"
    RANDOM = "random"
    FIRST_BLOCK = "first-block"
    MOST_CACHED = "most-cached"
    SHARED_CACHE = "shared-cache"
    INFINITE_CACHE = "infinite-cache"


def policy_of(name: str) -> Policy:
    """Raises CommandError."""
    try:
        return Policy(name)
    except ValueError:
        known = ", ".join(each.value for each in Policy)
        raise CommandError(f"there is no policy {name}; there are {known}") from None


def picker(policy: Policy, seed: int) -> Pick:
    """Given the usable prefill replicas by name and the prompt's names; empty pins nobody."""
    match policy:
        case Policy.OURS:
            return lambda _replicas, _names: ""
        case Policy.ROUND_ROBIN:
            return _RoundRobin()
        case Policy.RANDOM:
            rng = random.Random(seed)
            return lambda replicas, _names: rng.choice(replicas).name
        case Policy.FIRST_BLOCK:
            return _by_first_block
        case Policy.MOST_CACHED:
            return lambda replicas, _names: min(replicas, key=_most_cached).name
        case _:
            return lambda replicas, _names: min(replicas, key=_queue).name


class _RoundRobin:
    def __init__(self) -> None:
        self._turn = -1

    def __call__(self, replicas: Sequence[Replica], _names: Sequence[bytes]) -> str:
        self._turn += 1
        return replicas[self._turn % len(replicas)].name


def _by_first_block(replicas: Sequence[Replica], names: Sequence[bytes]) -> str:
    digest = blake2b(names[0] if names else b"", digest_size=8).digest()
    return replicas[int.from_bytes(digest, "little") % len(replicas)].name


def _queue(replica: Replica) -> tuple[float, str]:
    return replica.queued_tokens * replica.ms_per_token, replica.name


def _most_cached(replica: Replica) -> tuple[int, float, str]:
    return -replica.matched_blocks, *_queue(replica)
