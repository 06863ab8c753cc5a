"""What tenants could reuse of each other if there were no wall between them, for the record alone.

Prompts are named once more, under a key of this process that nobody else has and that no index ever
sees, and only how many tokens in a row were seen before is told: to the operator's counters, never
to a client.
"""

import secrets
from collections.abc import Sequence

from kvcache.block_hash import BlockHash, Namespace, TenantKey, index_names, tenant_key


class Walls:
    """Remembers between half of `max_names` block names and all of them, the latest."""

    def __init__(self, secret: str = "", max_names: int = 1_000_000) -> None:
        self._key: TenantKey = tenant_key(secret or secrets.token_hex(32))
        self._max_young = max(1, max_names // 2)
        self._young: set[BlockHash] = set()
        self._old: set[BlockHash] = set()

    def note(self, namespace: Namespace, prompt: Sequence[int], block_size: int) -> int:
        """Somebody sends this prompt; how many of its blocks, from the first on, anybody has sent
        before.
        """
        names = index_names(namespace, self._key, prompt, block_size)
        young, old = self._young, self._old
        seen = next(
            (at for at, name in enumerate(names) if name not in young and name not in old),
            len(names),
        )
        if len(young) + len(names) > self._max_young:
            self._old, self._young = young, set()
        self._young.update(names)
        return seen
