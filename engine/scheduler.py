"""Who runs in the next step, and for how many tokens.

There is no prefill phase and no decode phase here: a choice simply has pending tokens. A decode
step has one; a fresh prompt has many, and takes as large a chunk of them as the budget leaves.
Running choices go first, oldest first, so a long prompt never delays a token that someone waits
for, and a queue is served in order of arrival.

Admission is optimistic: a request is let in when its prompt fits beside what the running ones will
need in their next tokens, not when its longest possible output would. When a choice finds no block
for its next token, the newest one that is not pinned gives its blocks back and queues again; its
named blocks stay cached while there is room, and are looked up anew when it comes back.

A prompt whose KV comes from elsewhere is promised its blocks, and a few to grow by, so that once
begun it can be received and then decoded, whatever runs beside it. Which blocks those are is
decided when they are about to be written. Until then they serve as cache.

Before a prompt shares cached blocks, a sample of them is held against their digests
(`engine.recheck`). Whoever runs on one that has changed is sent back, as if preempted.

The oldest choice can take every block that is not pinned, held or promised; those come back by
themselves. So something always moves, or is reported as outgrown: it needs more than the pool has.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from engine.request import Choice, Request, State, TooLarge
from engine.step_plan import SlicePlan, StepPlan
from kvcache.block_hash import BlockHash
from kvcache.block_pool import BlockPool, OutOfBlocks
from kvcache.spec import CacheSpec

NameBlock = Callable[[Request, BlockHash | None, tuple[int, ...]], BlockHash]

_age = attrgetter("age")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_tokens_per_step: int = 512
    max_running: int = 64  # choices, over all requests
    growth_tokens: int = 32  # a running choice's next tokens, kept free of newcomers


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens `start` to `stop` of one choice. With the last of them, a token can be sampled."""

    choice: Choice
    start: int
    stop: int
    wants_logits: bool
    copy: tuple[int, int] | None = None  # a block to copy first, because another owner reads it


@dataclass(slots=True)
class Step:
    """What to run next; `outgrown` choices cannot go on in this pool, whoever else leaves."""

    slices: list[Slice] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)  # for the first time
    outgrown: list[Choice] = field(default_factory=list)

    def plan(self, step_id: int) -> StepPlan:
        slices = tuple(
            SlicePlan(
                part.choice.request.request_key,
                part.start,
                part.choice.tokens(part.start, part.stop),
                tuple(part.choice.block_table),
                part.wants_logits,
            )
            for part in self.slices
        )
        copies = tuple(part.copy for part in self.slices if part.copy is not None)
        return StepPlan(step_id, slices, copies)


class Scheduler:
    """Owns the block tables of all choices. Not thread-safe: its engine locks it."""

    def __init__(
        self, config: SchedulerConfig, pool: BlockPool, spec: CacheSpec, name_block: NameBlock
    ) -> None:
        self._config = config
        self._pool = pool
        self._spec = spec
        self._name_block = name_block
        self.waiting: list[Choice] = []  # oldest first, like `running`
        self.running: list[Choice] = []
        self.reserved: list[Choice] = []
        self.held: list[Choice] = []
        self.pinned: Counter[int] = Counter()  # blocks that somebody outside reads, how often
        self.num_preemptions = 0

    @property
    def num_seats_free(self) -> int:
        taken = sum(self._seats(choice) for choice in (*self.running, *self.reserved))
        return self._config.max_running - taken

    def refuse_impossible(self, request: Request) -> None:
        """Raise TooLarge if not even the first token of the request can ever be made here."""
        slots = min(len(request.prompt) + 1, request.max_slots)
        needed = self._spec.blocks_needed(request.max_slots if request.pinned else slots)
        if needed > self._pool.num_blocks:
            raise TooLarge(
                f"request {request.request_id} needs {needed} blocks for its"
                f" {len(request.prompt)} prompt tokens, the pool has {self._pool.num_blocks}"
            )
        if request.params.n > self._config.max_running:
            raise TooLarge(
                f"request {request.request_id} asks for {request.params.n} choices,"
                f" at most {self._config.max_running} can run"
            )

    def queue(self, choice: Choice) -> None:
        choice.sampled = choice.tainted = False
        insort(self.waiting, choice, key=_age)

    def unsampled(self) -> list[Choice]:
        """Those that may soon be admitted, and have not been told before."""
        ahead = self.waiting[: max(0, self.num_seats_free)]
        fresh = [choice for choice in ahead if not choice.sampled]
        for choice in fresh:
            choice.sampled = True
        return fresh

    def shareable(self, choice: Choice) -> list[BlockHash]:
        """The blocks that it would share, if they are resident, when it is admitted."""
        return choice.names[: (choice.num_tokens - 1) // self._spec.block_size]

    def next_step(self) -> Step:
        step = Step()
        budget = self._config.max_tokens_per_step
        for choice in list(self.running):
            if budget > 0 and choice in self.running:
                budget -= self._extend(choice, budget, step, may_preempt=True)
        while budget > 0 and self.waiting and self._admit(self.waiting[0], step):
            choice = self.waiting.pop(0)
            if choice in step.outgrown:
                continue
            insort(self.running, choice, key=_age)
            budget -= self._extend(choice, budget, step, may_preempt=False)
        return step

    def reserve(self, choice: Choice) -> None:
        """Promise blocks for the whole prompt, to be filled from outside, and for its next tokens;
        those that hold their KV already are owned from now on. Raises OutOfBlocks, having promised
        nothing, also when only those who came before would be left without.
        """
        seats = self._seats(choice) + sum(self._seats(other) for other in self.waiting)
        if seats > self.num_seats_free:
            raise OutOfBlocks(f"{seats} choices wait for {self.num_seats_free} free seats")
        ahead = (*self.running, *self.reserved, *self.waiting)
        self._take_table(choice, choice.names, 0, ahead)
        missing = self._prompt_blocks(choice) - len(choice.block_table)
        least = missing + self._grown_blocks(choice, 1)
        wanted = missing + self._grown_blocks(choice, self._config.growth_tokens)
        wanted += choice.request.params.n > 1  # the siblings share the tail of the prompt
        spare = self._pool.num_available - self._growth_blocks(ahead)
        count = max(least, min(wanted, spare))
        try:
            self._pool.promise(count)
        except OutOfBlocks:
            self._release(choice)
            raise
        choice.num_promised = count
        insort(self.reserved, choice, key=_age)

    def bind(self, choice: Choice) -> None:
        """Turn what a reserved choice was promised for its prompt into blocks. What has become
        resident of the prompt meanwhile is shared.
        """
        missing = self._prompt_blocks(choice) - len(choice.block_table)
        self._pool.unpromise(missing)
        choice.num_promised -= missing
        choice.block_table += self._pool.share(choice.names[len(choice.block_table) :])
        choice.num_named = len(choice.block_table)
        choice.block_table += self._pool.take(self._prompt_blocks(choice) - choice.num_named)

    def keep(self, choice: Choice, num_blocks: int) -> None:
        """The first blocks of a reserved choice hold their KV: name them, so that they outlive it
        as cache.
        """
        full = min(num_blocks, len(choice.names), len(choice.block_table))
        choice.num_computed = max(choice.num_computed, full * self._spec.block_size)
        self._name_full_blocks(choice)

    def adopt(self, choice: Choice) -> None:
        """A reserved choice's prompt is in its blocks: it runs, from its first output token on."""
        assert len(choice.block_table) == self._prompt_blocks(choice), "adopted without blocks"
        self.reserved.remove(choice)
        choice.num_computed = len(choice.request.prompt)
        self._name_full_blocks(choice)
        insort(self.running, choice, key=_age)

    def fork(self, parent: Choice, child: Choice) -> None:
        """Let `child` go on from the prompt that `parent` has computed, on the same blocks."""
        num_blocks = self._spec.blocks_needed(parent.num_computed)
        child.block_table = parent.block_table[:num_blocks]
        child.names = list(parent.names)
        child.num_computed = parent.num_computed
        child.num_named = parent.num_named
        self._pool.fork(child.block_table)
        insort(self.running, child, key=_age)

    def advance(self, part: Slice) -> None:
        """The slice's KV is in the cache: count it, and name the blocks that became full."""
        part.choice.num_computed = part.stop
        request = part.choice.request
        request.num_computed_tokens += max(0, min(part.stop, len(request.prompt)) - part.start)
        self._name_full_blocks(part.choice)

    def send_back(self, choice: Choice) -> None:
        """A running choice gives its blocks back and queues again; what it has put out stands."""
        self.running.remove(choice)
        self._release(choice)
        self.queue(choice)

    def drop(self, choice: Choice) -> None:
        """Take a choice out, wherever it is, and give its blocks back."""
        for place in (self.waiting, self.running, self.reserved, self.held):
            if choice in place:
                place.remove(choice)
        self._release(choice)

    def hold(self, choice: Choice) -> None:
        """Take a choice out of the running, but leave its blocks as they are until dropped."""
        for place in (self.waiting, self.running):
            if choice in place:
                place.remove(choice)
        self.held.append(choice)

    def pin(self, names: Iterable[BlockHash]) -> dict[BlockHash, int]:
        """Own those of these blocks that are resident, until they are unpinned."""
        ids: dict[BlockHash, int] = {}
        for name in dict.fromkeys(names):
            for block_id in self._pool.share([name]):
                ids[name] = block_id
        self.pinned.update(ids.values())
        return ids

    def unpin(self, block_ids: Sequence[int]) -> None:
        self.pinned -= Counter(block_ids)
        self._pool.release(reversed(block_ids))

    def check(self) -> None:
        """Raise if a table and the pool disagree about who owns what."""
        self._pool.check()
        owned: set[int] = set(self.pinned)
        placed = (*self.running, *self.reserved, *self.held)
        promised = sum(choice.num_promised for choice in placed)
        assert self._pool.num_promised == promised, (
            f"{self._pool.num_promised} blocks promised, choices count on {promised}"
        )
        for choice in placed:
            table = choice.block_table
            assert len(set(table)) == len(table), f"a block stands twice in {table}"
            assert choice.num_promised >= 0, f"{choice.num_promised} blocks promised"
            assert len(table) >= self._spec.blocks_needed(choice.num_computed)
            owned.update(table)
        assert self._pool.num_used == len(owned), (
            f"{self._pool.num_used} blocks in use, {len(owned)} in block tables"
        )
        for choice in self.reserved:
            missing = self._prompt_blocks(choice) - len(choice.block_table)
            assert missing <= choice.num_promised, f"{missing} blocks missing and not promised"
        for choice in self.waiting:
            assert not choice.block_table + [0] * choice.num_promised, "a queued choice has blocks"
        for place in (self.waiting, self.running):
            assert place == sorted(place, key=_age), "out of order"

    def _seats(self, choice: Choice) -> int:
        """A request takes its seats for all choices at once, though they fork later."""
        return 1 if choice.output or choice.request.hold else choice.request.params.n

    def _extend(self, choice: Choice, budget: int, step: Step, *, may_preempt: bool) -> int:
        """Give a running choice blocks for its next slice; return its length, 0 if it waits."""
        if self._outgrown(choice):
            step.outgrown.append(choice)
            return 0
        limit = choice.request.max_chunk_tokens or budget
        num_tokens = min(choice.num_pending, budget, limit)
        stop = choice.num_computed + num_tokens
        while True:
            try:
                copy = self._grow_table(choice, stop)
            except OutOfBlocks:
                if not may_preempt or not self._preempt_newest(than=choice):
                    return 0
            else:
                break
        wants_logits = stop == choice.num_tokens
        step.slices.append(Slice(choice, choice.num_computed, stop, wants_logits, copy))
        return num_tokens

    def _outgrown(self, choice: Choice) -> bool:
        """Whether the pool, all of it, is too small for the choice and its next token."""
        slots = min(choice.num_tokens + 1, choice.request.max_slots)
        return self._spec.blocks_needed(slots) > self._pool.num_blocks

    def _grow_table(self, choice: Choice, stop: int) -> tuple[int, int] | None:
        """Own every block up to token `stop`, and alone those that will be written; return the
        copy this takes. Raises OutOfBlocks, with the table as it was.
        """
        table = choice.block_table
        num_fresh = max(0, self._spec.blocks_needed(stop) - len(table))
        promised = min(num_fresh, choice.num_promised)
        fresh = self._pool.take(num_fresh, promised)
        choice.num_promised -= promised
        first = choice.num_computed // self._spec.block_size
        copy = None
        if first < len(table):
            left = min(1, choice.num_promised)
            try:
                block_id, copied = self._pool.writable(table[first], left)
            except OutOfBlocks:
                self._pool.release(reversed(fresh))
                self._pool.promise(promised)
                choice.num_promised += promised
                raise
            choice.num_promised -= left if copied else 0
            copy = (table[first], block_id) if copied else None
            table[first] = block_id
        table += fresh
        return copy

    def _preempt_newest(self, than: Choice) -> bool:
        """Send the newest choice that is newer and not pinned back to the queue, if there is one.

        It has no slice in this step: choices are extended oldest first.
        """
        for victim in reversed(self.running):
            if victim.age <= than.age:
                return False
            if not victim.request.pinned:
                self.send_back(victim)
                self.num_preemptions += 1
                return True
        return False

    def _admit(self, choice: Choice, step: Step) -> bool:
        """Give the first in the queue what its computed prefix holds; False if it must wait."""
        if self._outgrown(choice):
            step.outgrown.append(choice)
            return True
        if self._seats(choice) > self.num_seats_free:
            return False
        request = choice.request
        known = self.shareable(choice)
        slots = request.max_slots if request.pinned else 0
        try:
            self._take_table(choice, known, slots, (*self.running, *self.reserved))
        except OutOfBlocks:
            return False
        choice.num_computed = choice.num_named * self._spec.block_size
        request.state = State.RUNNING
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = choice.num_computed
            step.admitted.append(request)
        return True

    def _take_table(
        self, choice: Choice, names: list[BlockHash], slots: int, others: Sequence[Choice]
    ) -> None:
        """Own the resident blocks of `names`, and fresh ones after them for `slots` tokens.

        Raises OutOfBlocks, owning nothing, unless all tokens of the choice fit, with some to grow
        by, beside what `others` will soon need.
        """
        growth = self._config.growth_tokens if others else 0
        room = max(slots, min(choice.num_tokens + growth, choice.request.max_slots))
        needed = self._spec.blocks_needed(room) + self._growth_blocks(others)
        self._require(needed - self._pool.match(names))
        shared = self._pool.share(names)
        try:
            self._require(needed - len(shared))  # sharing took cached blocks out of reach
        except OutOfBlocks:
            self._pool.release(reversed(shared))
            raise
        fresh = self._pool.take(max(0, self._spec.blocks_needed(slots) - len(shared)))
        choice.block_table = shared + fresh
        choice.num_named = len(shared)

    def _require(self, num_blocks: int) -> None:
        if num_blocks > self._pool.num_available:
            raise OutOfBlocks(f"need {num_blocks} blocks, {self._pool.num_available} available")

    def _growth_blocks(self, choices: Iterable[Choice]) -> int:
        """Blocks these choices lack for the rest of their prompts and their next few tokens."""
        blocks = 0
        for choice in choices:
            slots = min(choice.num_tokens + self._config.growth_tokens, choice.request.max_slots)
            has = len(choice.block_table) + choice.num_promised
            blocks += max(0, self._spec.blocks_needed(slots) - has)
        return blocks

    def _prompt_blocks(self, choice: Choice) -> int:
        return self._spec.blocks_needed(len(choice.request.prompt))

    def _grown_blocks(self, choice: Choice, tokens: int) -> int:
        """Blocks beyond its prompt's that a choice needs for its first output tokens."""
        slots = min(len(choice.request.prompt) + tokens, choice.request.max_slots)
        return self._spec.blocks_needed(slots) - self._prompt_blocks(choice)

    def _name_full_blocks(self, choice: Choice) -> None:
        size = self._spec.block_size
        for index in range(choice.num_named, choice.num_computed // size):
            parent = choice.names[index - 1] if index else None
            if index == len(choice.names):
                tokens = choice.tokens(index * size, (index + 1) * size)
                choice.names.append(self._name_block(choice.request, parent, tokens))
            self._pool.name(choice.block_table[index], choice.names[index], parent)
            choice.num_named = index + 1

    def _release(self, choice: Choice) -> None:
        self._pool.release(reversed(choice.block_table))
        self._pool.unpromise(choice.num_promised)
        choice.num_promised = 0
        choice.block_table = []
        choice.num_computed = 0
        choice.num_named = 0
