"""A request that was checked, as everything behind the doors sees it."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash

from engine.sampling_params import SamplingParams
from kvcache.block_hash import BlockHash, Namespace, TenantKey, index_names
from router.targets import NO_TARGETS, Targets
from router.ways import Pins


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who is asking: `label` for logs, `key` for block names. Never taken from a request's body."""

    label: str
    key: TenantKey


@dataclass(frozen=True, slots=True)
class AcceptedRequest:
    """Every field was checked against its limit; nothing further along refuses it for its form."""

    request_id: str
    model: str
    prompt: tuple[int, ...]
    params: SamplingParams
    tenant: Tenant
    pins: Pins = field(default_factory=Pins)
    targets: Targets = NO_TARGETS
    priority: int = 0
    session: str = ""
    max_chunk_tokens: int = 0  # 0: the worker's own
    explain: bool = False
    chat: bool = False
    door: str = "grpc"
    num_public_tokens: int = 0  # of the prompt, from its first: shared by all tenants
    # The prompt as names are made of it; from the prompt where it is not given.
    packed: "array[int]" = field(default_factory=lambda: array("I"), repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.packed) != len(self.prompt):
            object.__setattr__(self, "packed", array("I", self.prompt))

    def digest(self) -> bytes:
        """The same for the same prompt, whoever sends it; names nothing."""
        return xxhash.xxh3_64_digest(self.packed)

    def block_names(self) -> Callable[[Namespace, int], list[BlockHash]]:
        """A function from (namespace, block size) to the prompt's names as the index knows them,
        computed once each.
        """
        known: dict[tuple[Namespace, int], list[BlockHash]] = {}

        def names(namespace: Namespace, block_size: int) -> list[BlockHash]:
            key = (namespace, block_size)
            if key not in known:
                known[key] = index_names(
                    namespace, self.tenant.key, self.packed, block_size, self.num_public_tokens
                )
            return known[key]

        return names
