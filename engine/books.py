"""Where every block of an engine is, and how many of its requests are where."""

from dataclasses import dataclass
from typing import Self

from engine.request import State
from engine.roster import Roster
from engine.scheduler import Scheduler
from kvcache.block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class Books:
    total_blocks: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    reserved_blocks: int  # part of used: waiting for a transfer
    promised_blocks: int  # part of free and cached: spoken for, and not bound yet
    waiting_requests: int
    running_requests: int
    reserved_requests: int
    held_requests: int

    @classmethod
    def of(cls, pool: BlockPool, scheduler: Scheduler, roster: Roster) -> Self:
        reserved = {block for choice in scheduler.reserved for block in choice.block_table}
        return cls(
            total_blocks=pool.num_blocks,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            used_blocks=pool.num_used,
            reserved_blocks=len(reserved),
            promised_blocks=pool.num_promised,
            waiting_requests=roster.count(State.QUEUED),
            running_requests=roster.count(State.RUNNING),
            reserved_requests=roster.count(State.RESERVED),
            held_requests=roster.count(State.HELD),
        )
