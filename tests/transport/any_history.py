"""Both ends of one transfer, driven through any order of events over wires that lose, repeat,
reorder and damage what they carry.

Hypothesis draws histories in `test_any_history`; `seeded_history` makes the one of a number, for
`test_planted_mistakes`, which has no use for shorter ones.
"""

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from kvcache.head_map import HeadMap
from kvcache.spec import CacheSpec
from protos.transfer_pb2 import CellRun, Chunk, Open
from transport.cell_runs import Cell, cells_of, runs_in, runs_of
from transport.incoming import Incoming, Remedy, Verdict
from transport.orders import Code, TransferFailed
from transport.outgoing import Outgoing
from transport.outgoing_pair import OutgoingPair
from transport.plan import pair_plans, sources_of
from transport.repairs import Ask, Source
from transport.sealed_runs import Run
from transport.shipment import Receiving, Sending, Shape

SPEC = CacheSpec.full(num_layers=2, num_kv_heads=3, head_dim=1, block_size=4, dtype="int8")
BLOCK_BYTES = 8  # of one head: 2 planes x 4 tokens
WINDOW = 4 * BLOCK_BYTES
MAX_RESENDS = 3

EVENTS = [
    *["seal"] * 2,
    *["send"] * 4,
    *["arrive"] * 4,
    *["answer"] * 4,
    *["finish_verifying"] * 3,
    "arrive_out_of_order",
    "repeat",
    "lose",
    "damage",
    "mend",
    "pull",
    "end_call",
    "wait",
    "commit",
    "give_up",
]
Message = tuple[str, object]
Pair = tuple[int, int]  # prefill rank, decode rank


@dataclass
class Way:
    """What is under way between one pair."""

    down: list[Message] = field(default_factory=list)
    up: list[Message] = field(default_factory=list)
    staged: list[tuple[Chunk | list[Cell], int]] = field(default_factory=list)  # what, how bad
    calls: list[list[Cell]] = field(default_factory=list)  # cells asked for past the link


class AnyHistory(RuleBasedStateMachine):
    num_steps: ClassVar[int] = 0  # of all histories

    @initialize(
        prefill_tp=st.integers(1, 3),
        decode_tp=st.integers(1, 3),
        num_tokens=st.integers(1, 18),
        resident=st.integers(0, 5),
        chunk_blocks=st.integers(1, 3),
        most_chunks=st.sampled_from([1, 2, 4]),
        faulty=st.booleans(),
    )
    def begin(
        self,
        prefill_tp: int,
        decode_tp: int,
        num_tokens: int,
        resident: int,
        chunk_blocks: int,
        most_chunks: int,
        faulty: bool,
    ) -> None:
        self.faulty = faulty  # whether an end may give up; else the transfer must succeed
        self.num_damaged = 0
        self.harm = {"damaged": 1, "scratched": 2}
        self.shape = Shape.of(SPEC, num_tokens)
        self.num_tokens = num_tokens
        self.first_block = min(resident, self.shape.num_blocks)
        source = HeadMap.even(3, 3, prefill_tp).kv
        target = HeadMap.even(3, 3, decode_tp).kv
        plans = pair_plans(source, target)
        self.ways: dict[Pair, Way] = {(p.prefill_rank, p.decode_rank): Way() for p in plans}
        self.outgoing = [
            Outgoing(
                {
                    plan.decode_rank: OutgoingPair(
                        plan.heads, self.shape, chunk_blocks * BLOCK_BYTES, most_chunks
                    )
                    for plan in plans
                    if plan.prefill_rank == rank
                }
            )
            for rank in range(prefill_tp)
        ]
        self.incoming = [
            Incoming(
                self.shape,
                num_tokens,
                self.first_block,
                sources_of(rank, interval, source),
                MAX_RESENDS,
            )
            for rank, interval in enumerate(target)
        ]
        self.to_seal = [
            [
                Run(layer, block, (100 + block,))
                for block in range(self.shape.num_blocks)
                for layer in range(self.shape.num_layers)
            ]
            for _ in range(prefill_tp)
        ]
        self.writes: Counter[tuple[int, int, int, int]] = Counter()
        self.given_up = False
        for outgoing in self.outgoing:
            outgoing.advance()
        for pair in self.ways:
            self.remind(pair)

    # the two ends, as their shells drive them

    def heads(self, pair: Pair) -> tuple[int, ...]:
        return self.outgoing[pair[0]].pairs[pair[1]].heads

    def remind(self, pair: Pair) -> None:
        prefill, decode = pair
        outgoing = self.outgoing[prefill]
        mine = outgoing.pairs[decode]
        if outgoing.over or mine.committed:
            return
        if mine.first_block is None:
            heads = self.heads(pair)
            offer = Open(num_tokens=self.num_tokens, num_layers=2, heads=heads)
            self.ways[pair].down.append(("open", offer))
        elif mine.seal_sent:
            self.ways[pair].down.append(("seal_all", mine.num_chunks))

    def pump(self, pair: Pair) -> bool:
        prefill, decode = pair
        outgoing = self.outgoing[prefill]
        mine = outgoing.pairs[decode]
        if outgoing.over:
            return False
        part = mine.take()
        if part is not None and part.heads:
            run = CellRun(
                layer=part.run.layer,
                first_block=part.run.first_block,
                num_blocks=len(part.run.block_ids),
                heads=part.heads,
            )
            self.ways[pair].down.append(("again", run))
        elif part is not None:
            chunk = Chunk(
                seq=part.seq,
                layer=part.run.layer,
                num_layers=part.num_layers,
                first_block=part.run.first_block,
                num_blocks=len(part.run.block_ids),
            )
            self.ways[pair].down.append(("chunk", chunk))
            mine.sent(part.seq, now=0.0)
        elif outgoing.seal_due(decode):
            mine.seal_sent = True
            self.ways[pair].down.append(("seal_all", mine.num_chunks))
        else:
            return False
        outgoing.advance()
        return True

    def at_decode(self, pair: Pair, kind: str, value: object) -> None:
        prefill, decode = pair
        incoming, way = self.incoming[decode], self.ways[pair]
        if incoming.over:
            committed = incoming.failure is None
            if kind in ("open", "seal_all") and not committed:
                way.up.append(("abort", incoming.failure))
            elif kind == "seal_all":
                way.up.append(("commit", None))
        elif kind == "open":
            assert isinstance(value, Open)
            if incoming.open(prefill, value):
                way.up.append(("credit", self.first_block))
        elif kind == "abort":
            incoming.fail(Code.CANCELLED, "prefill gave up")
        elif kind == "seal_all":
            assert isinstance(value, int)
            way.up += [("nack", seq) for seq in incoming.seal(prefill, value)]
        elif isinstance(value, CellRun):
            cells = incoming.offer_again(prefill, value)
            if cells:
                way.staged.append((cells, self.harm.get(kind, 0)))
        elif kind == "broken":
            assert isinstance(value, Chunk)
            match incoming.damaged(prefill, value, "broken"):
                case Remedy.ASK:
                    way.up.append(("nack", value.seq))
                case Remedy.LET_GO:
                    way.up.append(("ack", value.seq))
        else:
            chunk, damaged = value, self.harm.get(kind, 0)
            assert isinstance(chunk, Chunk)
            verdict = incoming.offer(prefill, chunk)
            assert verdict is not Verdict.BAD
            if verdict is Verdict.TAKE:
                way.staged.append((chunk, damaged))
            elif verdict is Verdict.KNOWN:
                way.up.append(("ack", chunk.seq))
        self.settle(decode)

    def at_prefill(self, pair: Pair, kind: str, value: object) -> None:
        prefill, decode = pair
        outgoing = self.outgoing[prefill]
        mine = outgoing.pairs[decode]
        if kind == "abort":
            outgoing.fail(Code.CANCELLED, "decode gave up")
        elif outgoing.over:
            pass
        elif kind == "commit":
            outgoing.commit(decode)
        elif isinstance(value, list):
            for run in value:
                found = outgoing.places.find(run.layer, run.first_block, run.num_blocks)
                assert found is not None, "asked for what was never sent"
                mine.send_again(found, tuple(run.heads))
        elif isinstance(value, int) and kind == "credit":
            mine.grant(value, WINDOW)
        elif isinstance(value, int) and kind == "ack":
            mine.acked(value)
        elif isinstance(value, int):
            try:
                mine.nacked(value)
            except TransferFailed as failure:
                self.give_up_prefill(prefill, failure.code)
        outgoing.advance()

    def verify(self, pair: Pair, index: int) -> None:
        prefill, decode = pair
        incoming, way = self.incoming[decode], self.ways[pair]
        chunk, damaged = way.staged.pop(index)
        if isinstance(chunk, list):
            self.verify_again(pair, chunk, damaged)
        elif incoming.failure is not None:
            incoming.dropped(prefill, chunk)
        else:
            runs = runs_in(chunk, self.heads(pair))
            bad = self.write(decode, [cell for run in runs for cell in cells_of(run)], damaged)
            incoming.landed(prefill, chunk, bad)
            way.up.append(("ack", chunk.seq))
        self.settle(decode)

    def verify_again(self, pair: Pair, cells: list[Cell], damaged: int) -> None:
        prefill, decode = pair
        if self.incoming[decode].failure is None:
            bad = self.write(decode, cells, damaged)
            self.incoming[decode].landed_again(prefill, cells, bad, num_bytes=0)

    def write(self, decode: int, cells: list[Cell], damaged: int) -> dict[Cell, str]:
        """All of them, but every second one, or every third, of those that came damaged."""
        bad = {cell: "damaged" for cell in cells[:: damaged + 1]} if damaged else {}
        self.writes.update((decode, *cell) for cell in cells if cell not in bad)
        return bad

    def mend(self, pair: Pair, index: int) -> None:
        prefill, decode = pair
        due = self.incoming[decode].repairs.due(asked_before=index)
        cells = [cell for cell, wanted in due if wanted.rank == prefill]
        for cell, wanted in due:
            if cell in cells:
                wanted.book(Ask(Source.LINK, prefill), now=index)
        if cells and not self.incoming[decode].over:
            self.ways[pair].up.append(("cells_again", runs_of(cells)))

    def pull(self, pair: Pair, index: int) -> None:
        """The link is not to be trusted, or asked in vain: a call for what is due."""
        prefill, decode = pair
        incoming = self.incoming[decode]
        due = incoming.repairs.due(asked_before=index) if not incoming.over else []
        cells = [cell for cell, wanted in due if wanted.rank == prefill]
        for cell, wanted in due:
            if cell in cells:
                wanted.book(Ask(Source.CALL, prefill), now=index)
        if cells:
            self.ways[pair].calls.append(cells)

    def end_call(self, pair: Pair, index: int) -> None:
        """It brings all, some or none of the cells, whole or not."""
        prefill, decode = pair
        incoming, way = self.incoming[decode], self.ways[pair]
        if not way.calls:
            return
        cells = way.calls.pop(index % len(way.calls))
        brought = cells[: len(cells) - index % 3] if index % 4 else []
        for run in runs_of(brought):
            taken = incoming.offer_again(prefill, run)
            if taken:
                self.verify_again(pair, taken, damaged=int(self.faulty and index % 7 == 6))
        incoming.repairs.end_call(cells, "the call brought nothing")
        self.settle(decode)

    def settle(self, decode: int) -> None:
        incoming = self.incoming[decode]
        if incoming.failure is not None:
            self.given_up = True
            if incoming.state is Receiving.ABORTING:
                for pair, way in self.ways.items():
                    if pair[1] == decode:
                        way.up.append(("abort", incoming.failure))
            staged = sum(len(w.staged) for pair, w in self.ways.items() if pair[1] == decode)
            incoming.settle(staged)
            if incoming.state is Receiving.FREED:
                assert not staged, "freed under a writer"

    def give_up_prefill(self, prefill: int, code: Code = Code.CANCELLED) -> None:
        if self.outgoing[prefill].fail(code, "given up"):
            self.given_up = True
            for pair, way in self.ways.items():
                if pair[0] == prefill:
                    way.down.append(("abort", None))

    # what may happen

    @rule(seed=st.integers(0, 2**32 - 1), count=st.sampled_from([1, 5, 20, 60]))
    def happen(self, seed: int, count: int) -> None:
        """Drawn from a seed of its own: as single choices, hypothesis keeps histories too short."""
        rng = Random(seed)
        for _ in range(count):
            pair = rng.choice(list(self.ways))
            getattr(self, rng.choice(EVENTS))(pair, rng.randrange(60))
            self.hold()
        AnyHistory.num_steps += count

    def seal(self, pair: Pair, index: int) -> None:
        outgoing, waiting = self.outgoing[pair[0]], self.to_seal[pair[0]]
        for _ in range(index % 6):
            if outgoing.over or outgoing.finished:
                return
            if waiting:
                outgoing.seal(waiting.pop(0))
            else:
                outgoing.finish()

    def send(self, pair: Pair, index: int) -> None:
        self.pump(pair)

    def arrive(self, pair: Pair, index: int) -> None:
        down = self.ways[pair].down
        if down:
            self.at_decode(pair, *down.pop(0))

    def arrive_out_of_order(self, pair: Pair, index: int) -> None:
        down = self.ways[pair].down
        if down:
            self.at_decode(pair, *down.pop(index % len(down)))

    def answer(self, pair: Pair, index: int) -> None:
        up = self.ways[pair].up
        if up:
            self.at_prefill(pair, *up.pop(0))

    def finish_verifying(self, pair: Pair, index: int) -> None:
        staged = self.ways[pair].staged
        if staged:
            self.verify(pair, index % len(staged))

    def repeat(self, pair: Pair, index: int) -> None:
        queue = (self.ways[pair].down, self.ways[pair].up)[index % 2]
        if queue and (
            self.faulty or queue[index % len(queue)][0] not in ("damaged", "broken", "scratched")
        ):
            queue.append(queue[index % len(queue)])

    def lose(self, pair: Pair, index: int) -> None:
        queue = (self.ways[pair].down, self.ways[pair].up)[index % 2]
        if queue:
            queue.pop(index % len(queue))

    def damage(self, pair: Pair, index: int) -> None:
        down = self.ways[pair].down
        may_damage = self.faulty or self.num_damaged < MAX_RESENDS
        if may_damage and down and down[index % len(down)][0] in ("chunk", "again"):
            kind, what = down[index % len(down)]
            worst = "damaged" if kind == "again" else "broken"  # cells asked for say their place
            how = ["damaged", "scratched", worst][index % 3]
            down[index % len(down)] = (how, what)
            self.num_damaged += 1

    def wait(self, pair: Pair, index: int) -> None:
        self.outgoing[pair[0]].pairs[pair[1]].probe(now=1.0, patience_s=0.0)
        self.mend(pair, index=99)
        self.remind(pair)

    def commit(self, pair: Pair, index: int) -> None:
        """Once all are whole, the group commits, one rank after the other."""
        decode = pair[1]
        if all(incoming.whole for incoming in self.incoming):
            if self.incoming[decode].state is Receiving.WHOLE:
                self.incoming[decode].commit()
            for each, way in self.ways.items():
                if each[1] == decode:
                    way.up.append(("commit", None))

    def give_up(self, pair: Pair, index: int) -> None:
        """Seldom: a history that ends early shows little."""
        if not self.faulty or self.given_up or index > 5:
            return
        self.given_up = True
        prefill, decode = pair
        if index < 2:
            self.give_up_prefill(prefill)
        elif index < 4:
            self.incoming[decode].fail(Code.CANCELLED, "given up")
        else:
            self.ways[pair].down.clear()
            self.ways[pair].up.clear()
            if not self.outgoing[prefill].pairs[decode].committed:
                self.give_up_prefill(prefill, Code.UNAVAILABLE)
            self.incoming[decode].lose(prefill, "cut")
        self.settle(decode)

    # what holds all the time, and in the end

    @invariant()
    def hold(self) -> None:
        if hasattr(self, "ways"):
            self.books_balance()
            self.nothing_is_written_twice()
            self.whole_means_every_cell()
            self.whole_blocks_are_those_written_from_the_first_on()
            self.released_means_committed_by_all()

    def books_balance(self) -> None:
        for incoming in self.incoming:
            incoming.check()
        for outgoing in self.outgoing:
            for pair in outgoing.pairs.values():
                pair.check()
                limit = max(WINDOW, 3 * BLOCK_BYTES * len(pair.heads))
                assert pair.unacked_bytes <= limit

    def nothing_is_written_twice(self) -> None:
        assert all(count == 1 for count in self.writes.values())

    def whole_means_every_cell(self) -> None:
        for rank, incoming in enumerate(self.incoming):
            if incoming.whole:
                heads = sum(len(pair.heads) for pair in incoming.pairs.values())
                cells = 2 * heads * (self.shape.num_blocks - self.first_block)
                assert sum(key[0] == rank for key in self.writes) == cells

    def whole_blocks_are_those_written_from_the_first_on(self) -> None:
        for rank, incoming in enumerate(self.incoming):
            heads = [head for pair in incoming.pairs.values() for head in pair.heads]
            whole = self.first_block
            while whole < self.shape.num_blocks and all(
                self.writes[(rank, layer, whole, head)] for layer in range(2) for head in heads
            ):
                whole += 1
            assert incoming.num_whole_blocks == whole

    def released_means_committed_by_all(self) -> None:
        for outgoing in self.outgoing:
            if outgoing.state is Sending.RELEASED:
                for decode in outgoing.pairs:
                    assert self.incoming[decode].state is Receiving.COMMITTED

    def teardown(self) -> None:
        """From any state, wires that work again bring both ends to the same end."""
        if not hasattr(self, "ways"):
            return
        for _ in range(60):
            for pair in self.ways:
                for _ in range(20):
                    self.seal(pair, 5)
                while self.pump(pair):
                    pass
                for index in range(30):
                    self.arrive(pair, index)
                    self.finish_verifying(pair, 0)
                    self.answer(pair, index)
                    self.end_call(pair, 1)
                self.wait(pair, 0)
                self.commit(pair, 0)
        self.hold()
        if not self.faulty:
            assert all(incoming.state is Receiving.COMMITTED for incoming in self.incoming)
            assert all(outgoing.state is Sending.RELEASED for outgoing in self.outgoing)
        assert all(outgoing.over or self.given_up for outgoing in self.outgoing)


def seeded_history(seed: int, num_events: int = 120) -> None:
    """Raises AssertionError where something does not hold."""
    random, history = Random(seed), AnyHistory()
    history.begin(
        prefill_tp=random.randint(1, 3),
        decode_tp=random.randint(1, 3),
        num_tokens=random.randint(1, 18),
        resident=random.choice([0, 0, 1, 3, 5]),
        chunk_blocks=random.randint(1, 3),
        most_chunks=random.choice([1, 2, 4]),
        faulty=random.random() < 0.5,
    )
    history.happen(seed=random.getrandbits(32), count=num_events)
    history.teardown()
