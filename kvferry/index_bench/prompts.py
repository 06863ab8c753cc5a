"""Prompts that two processes make alike, and the workers of a fleet that holds their blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcache.block_hash import PUBLIC, BlockHash, index_names, namespace
from prefix_index.index import BlockEvent, Load, Manifest, Removed, Role, Stored, WorkerRecord

BLOCK_SIZE = 16
VOCAB_SIZE = 49_152
PROMPT_TOKENS = 8192
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_SIZE
SPACE = namespace(weights=b"bench", config=b"", tokenizer=b"", adapter="", cache=b"")

MANIFEST = Manifest(
    protocol=1,
    model="bench",
    namespace=SPACE.hex(),
    block_size=BLOCK_SIZE,
    dtype="bfloat16",
    num_layers=32,
    num_query_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_context=32_768,
    vocab_size=VOCAB_SIZE,
    wires=("tcp", "grpc"),
)


def prompt(number: int) -> tuple[int, ...]:
    tokens = np.random.default_rng(number).integers(0, VOCAB_SIZE, PROMPT_TOKENS)
    return tuple(tokens.tolist())


def names_of(number: int) -> list[BlockHash]:
    return index_names(SPACE, PUBLIC, prompt(number), BLOCK_SIZE)


def stored(number: int) -> list[BlockEvent]:
    return [Stored(name, None, depth) for depth, name in enumerate(names_of(number))]


def removed(events: Sequence[BlockEvent]) -> list[BlockEvent]:
    """What undoes them: leaves first."""
    return [Removed(event.name) for event in reversed(events)]


@dataclass(frozen=True, slots=True)
class Size:
    """Every prompt is held by one worker at first, in turn."""

    num_workers: int
    num_blocks: int

    @property
    def num_prompts(self) -> int:
        return -(-self.num_blocks // PROMPT_BLOCKS)

    def prompts_of(self, worker: int) -> list[int]:
        """The numbers of those that it holds at first."""
        return list(range(worker, self.num_prompts, self.num_workers))


def load(running: int, queued_tokens: int, num_blocks: int) -> Load:
    return Load(
        running=running,
        waiting=0,
        queued_tokens=queued_tokens,
        free_blocks=num_blocks,
        total_blocks=2 * num_blocks + PROMPT_BLOCKS,
        prefill_ms_per_token=0.05,
        decode_step_ms=15.0,
        draining=False,
    )


def record(number: int, epoch: int, busy: Load) -> WorkerRecord:
    """Every other worker prefills."""
    return WorkerRecord(
        name=f"w{number}",
        role=Role.DECODE if number % 2 else Role.PREFILL,
        instance=f"w{number}/{epoch}",
        epoch=epoch,
        address=f"10.0.{number // 250}.{number % 250}:50061",
        system_address="",
        rank_addresses=(f"10.0.{number // 250}.{number % 250}:50061",),
        kv_intervals=((0, 8),),
        manifest=MANIFEST,
        load=busy,
    )
