"""The engine of rank 0: a thread that plans, runs and hands out, one step after another.

A step: check a sample of the cached blocks that prompts are about to share; settle what callers
asked for meanwhile; plan; broadcast the plan to the other ranks; run it; draw tokens; give them
out. One lock guards pool, scheduler and roster. It is not held while the model runs, so callers
never wait for a forward pass, and what they ask for takes effect after it.
Every accepted request ends exactly once: with the last token of its last choice, or with Failed.

When the model raises, or gives one request after another no numbers, or a rank is lost, every
request fails and the engine is over. Its process is expected to end, and whoever watches it to
start another.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from random import Random

from engine.books import Books
from engine.clock import Clock
from engine.load import Gauge, Load, share
from engine.preparing import Preparing
from engine.rank_group import RankLost
from engine.recheck import Due, Rechecks, recheck
from engine.request import EngineStopped, Request, TokenOutput
from engine.roster import Delivery, Reservation, Roster, Stats
from engine.runner import Runner, SliceObserver
from engine.sampler import sample
from engine.scheduler import Scheduler, SchedulerConfig, Step
from engine.step_plan import Kind, StepPlan
from kvcache.block_hash import BlockHash, Namespace
from kvcache.block_pool import BlockEvent, BlockPool, Stored
from kvcache.kv_store import KvStore
from model.comm import Comm
from model.model import Model
from model.tokenizer import Tokenizer
from protos.worker_pb2 import GeneratedToken

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    max_tokens_per_step: int = 512
    max_running: int = 64  # choices, over all requests
    max_waiting: int = 256  # choices; a preempted one counts
    growth_tokens: int = 32  # see engine.scheduler
    vocab_size: int | None = None  # None: whoever sends tokens has checked them
    max_context: int | None = None
    idle_beat_s: float = 1.0  # how often an idle engine tells its ranks that it lives
    max_nonfinite_in_a_row: int = 8  # requests, without a token between them
    lost_rank_grace_s: float = 1.0  # how long a failed step waits to learn that a rank is gone
    recheck_share: float = 1 / 64  # of cached blocks, whenever they are to be shared
    quiet_s: float = 0.02  # without work, before blocks without a digest get theirs


class ModelBroken(Exception):
    """What comes out of it is no numbers, whatever goes in: its weights may have been damaged."""


class Engine:
    """Thread-safe. Outputs are called without the lock, on the engine's thread (when a rank is
    lost or the engine stopped, perhaps on another).
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        store: KvStore,
        pool: BlockPool,
        comm: Comm,
        namespace: Namespace,
        clock: Clock,
        *,
        tokenizer: Tokenizer | None = None,
        observer: SliceObserver | None = None,
        lost_rank: Callable[[], str | None] = lambda: None,
        on_death: Callable[[Exception], None] = lambda error: None,
        random: Random | None = None,
    ) -> None:
        """`tokenizer` is needed for stop strings. `lost_rank` says which rank is gone, if one is.
        `on_death` is called once, after every request has failed, with what ended the engine;
        `stop` does not call it. `random` draws the cached blocks that are checked.
        """
        assert comm.rank == 0, "only rank 0 has an engine"
        assert store.num_blocks == pool.num_blocks, "pool and store differ in size"
        self._config = config
        self._pool = pool
        self._comm = comm
        self._clock = clock
        self._preparing = Preparing(
            namespace, store.spec.block_size, config.vocab_size, config.max_context, tokenizer
        )
        self._lost_rank = lost_rank
        self._on_death = on_death
        self._store = store
        self._runner = Runner(model, store, observer)
        self._rechecks = Rechecks(pool, store.kept, config.recheck_share, random or Random())
        scheduling = SchedulerConfig(
            config.max_tokens_per_step, config.max_running, config.growth_tokens
        )
        self._scheduler = Scheduler(scheduling, pool, store.spec, self._preparing.name_block)
        self._roster = Roster(self._scheduler, self._preparing.stop_rules, config.max_waiting)
        self._gauge = Gauge()
        self._changed = threading.Condition()  # its lock is the engine's
        self._news = False  # something changed since the last settling
        self._num_keys = 0
        self._stopping = False
        self._death: Exception | None = None
        self._step_since: float | None = None  # None between steps
        self._thread: threading.Thread | None = None

    def new_key(self) -> int:
        """A request key that no other request of this engine has."""
        with self._changed:
            self._num_keys += 1
            return self._num_keys

    def add(self, request: Request) -> None:
        """Queue a request. Raises Refused, among them QueueFull and TooLarge."""
        self._preparing.prepare(request)
        with self._changed:
            self._check_alive()
            request.queued_at = self._clock.now()
            self._roster.queue(request, self._retry_after_ms())
            self._tell()

    def cancel(self, request: Request | str) -> bool:
        """End a queued or running request, before the next step, with CANCELLED; False if there is
        none. A reserved request is ended by `abandon`, a held one by `release_held`.

        An id means whoever has it. Whoever cleans up after itself passes its request: if that was
        refused because its id was taken, the namesake runs on.
        """
        with self._changed:
            self._tell()
            return self._roster.cancel(request)

    def release_held(self, request: Request | str) -> bool:
        """Give back the blocks of a request with `hold`, ending it first if it still runs."""
        with self._changed:
            self._tell()
            return self._roster.release_held(request)

    def reserve(self, request: Request) -> Reservation:
        """Have blocks promised for a prompt whose KV will come from elsewhere.

        Raises Refused; and OutOfBlocks when blocks or seats are not to be had now.
        """
        self._preparing.prepare(request)
        with self._changed:
            self._check_alive()
            return self._roster.reserve(request)

    def bind(self, reservation: Reservation) -> None:
        """Turn the promise into blocks: the reservation's table says which, and how many of the
        first hold their KV already. Raises Refused.
        """
        with self._changed:
            self._check_alive()
            self._roster.bind(reservation)

    def adopt(self, reservation: Reservation, first_tokens: Sequence[GeneratedToken]) -> None:
        """The prompt's KV is in the blocks on every rank, and these tokens, one a choice, follow.

        The request joins the running before the next step, and puts out its first tokens itself.
        Raises Refused; the reservation then stands.
        """
        tokens = sorted(map(TokenOutput.from_proto, first_tokens), key=lambda token: token.choice)
        self._preparing.check_vocabulary([token.token_id for token in tokens])
        with self._changed:
            self._check_alive()
            self._roster.adopt(reservation, tokens)
            self._tell()

    def abandon(self, reservation: Reservation, num_whole_blocks: int = 0) -> bool:
        """Free reserved blocks that nobody writes to any more; False if adopted or abandoned.

        The first `num_whole_blocks` hold their KV on every rank: they stay, as cache.
        """
        with self._changed:
            self._tell()
            return self._roster.abandon(reservation, num_whole_blocks)

    def match(self, names: Sequence[BlockHash]) -> int:
        """How many of these blocks, from the first on, are resident now."""
        with self._changed:
            return self._pool.match(names)

    def drain_events(self) -> list[BlockEvent]:
        with self._changed:
            return self._pool.drain_events()

    def resident(self) -> list[BlockHash]:
        with self._changed:
            return self._pool.resident()

    def resident_blocks(self) -> list[Stored]:
        with self._changed:
            return self._pool.resident_blocks()

    def forget_speed(self) -> None:
        """Measure prefill and decode anew: what was measured so far was not typical."""
        with self._changed:
            self._gauge = Gauge()

    def pin(self, names: Sequence[BlockHash]) -> dict[BlockHash, int]:
        """Hold those of these blocks that are here, to be read; give them back with `unpin`."""
        with self._changed:
            return self._scheduler.pin(names)

    def unpin(self, block_ids: Sequence[int]) -> None:
        with self._changed:
            self._scheduler.unpin(block_ids)

    def sample_reuse(self, names: Sequence[BlockHash]) -> "Future[None] | None":
        """Draw among the blocks that a prompt with these names would share now. If any is drawn:
        done when they are checked, and those that have changed are dropped.
        """
        with self._changed:
            if self._is_over or not self._rechecks.sample(names):
                return None
            self._tell()
            return self._rechecks.await_due()

    def suspect(self, names: Sequence[BlockHash]) -> None:
        """Somebody has found one of these blocks changed: check all that are here."""
        with self._changed:
            if not self._is_over and self._rechecks.suspect(names):
                self._tell()

    def suspect_blocks(self, block_ids: Sequence[int]) -> None:
        """As `suspect`, of blocks that a rank knows by their ids: those that bear a name now."""
        with self._changed:
            if not self._is_over and self._rechecks.suspect_blocks(block_ids):
                self._tell()

    def flush_cache(self) -> int:
        with self._changed:
            return self._pool.flush()

    @property
    def death(self) -> Exception | None:
        """What ended the engine, if it did not end by `stop`."""
        return self._death

    @property
    def step_age_s(self) -> float:
        """How long the running step has lasted; 0 between steps. Takes no lock: it may hang."""
        since = self._step_since
        return 0.0 if since is None else self._clock.now() - since

    def load(self) -> Load:
        with self._changed:
            scheduler = self._scheduler
            return Load(
                running=len(scheduler.running) + len(scheduler.reserved),
                waiting=len(scheduler.waiting),
                queued_tokens=self._queued_tokens(),
                free_blocks=self._pool.num_available,
                total_blocks=self._pool.num_blocks,
                prefill_ms_per_token=self._gauge.prefill_ms_per_token,
                decode_step_ms=self._gauge.decode_step_ms,
                step_sequences=self._gauge.step_sequences,
                step_context_tokens=self._gauge.step_context_tokens,
                context_tokens=sum(each.num_tokens for each in scheduler.running),
                computed_prompts=self._roster.stats.computed_prompts,
            )

    def stats(self) -> Stats:
        with self._changed:
            return self._roster.stats

    def books(self) -> Books:
        with self._changed:
            return Books.of(self._pool, self._scheduler, self._roster)

    def take_stock(self) -> None:
        """Enter into the ledger what the pool itself counts."""
        with self._changed:
            self._pool.take_stock()

    def check(self) -> None:
        """Raise AssertionError if pool, tables and requests disagree. Safe at any time."""
        with self._changed:
            self._roster.check()

    def start(self) -> None:
        assert self._thread is None, "an engine starts once"
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> bool:
        """Let the running step end, fail what is left with UNAVAILABLE, tell the other ranks to
        stop. Returns whether the thread has ended.
        """
        with self._changed:
            self._stopping = True
            self._tell()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def lose(self, reason: str) -> None:
        """A rank is gone: fail everything now, on the caller's thread; the step may hang."""
        self._die(RankLost(reason))

    def step(self) -> bool:
        """One step on the caller's thread; False if there was nothing to do. For simulations, and
        for tests, which call it instead of `start`.
        """
        with self._changed:
            if self._death is not None:
                return False
            self._news = False
            for names in self._roster.unsampled():
                self._rechecks.sample(names)
            due, waiting = self._rechecks.take()
        self._check_due(due, waiting)
        with self._changed:
            if self._death is not None:
                return False
            told = self._roster.settle()
            step, failed = self._roster.plan()
            plan = step.plan(self._roster.stats.steps)
        self._deliver(told + failed)
        if not step.slices:
            return bool(told or failed or due)
        started = self._step_since = self._clock.now()
        try:
            self._execute(step, plan, started)
        finally:
            self._step_since = None
        with self._changed:
            self._gauge.measure(step, (self._clock.now() - started) * 1000)
        return True

    def _check_due(self, due: Due, waiting: "Sequence[Future[None]]") -> None:
        try:
            if due:
                self._check_blocks(due)
                with self._changed:
                    self._roster.rechecked(len(due))
        finally:
            for future in waiting:
                if future.set_running_or_notify_cancel():
                    future.set_result(None)

    def _check_blocks(self, due: Due) -> None:
        """Hold them against their digests on every rank; drop those that any rank finds changed."""
        plan = StepPlan(0, kind=Kind.CHECK, checks=tuple(due))
        if self._comm.size > 1:
            self._comm.broadcast_ints(plan.encode())
        findings = recheck(self._store, self._comm, plan.checks)
        told: list[Delivery] = []
        with self._changed:
            for block_id, ranks in findings.items():
                num_names = self._pool.disown(due[block_id], block_id)
                if num_names:
                    reason = (
                        f"block {block_id} is not what it was when it was cached, on rank"
                        f" {', '.join(map(str, ranks))}: it is dropped from the cache, with"
                        f" {num_names - 1} that follow it, and what needs them is computed again"
                    )
                    log.error("%s", reason)
                    self._roster.disowned(num_names)
                    told += self._roster.taint({block_id}, reason)
        self._deliver(told)

    def _execute(self, step: Step, plan: StepPlan, started: float) -> None:
        if self._comm.size > 1:
            self._comm.broadcast_ints(plan.encode())
        logits_RV = self._runner.run(plan)
        assert logits_RV is not None, "rank 0 gets the logits"
        drawn = sample(logits_RV, self._roster.draws(step))
        share(step, started, self._clock.now())
        with self._changed:
            first = [] if self._death is not None else self._roster.first_tokens(step, drawn)
        self._deliver(first)
        with self._changed:
            if self._death is not None:
                return  # everything has failed meanwhile
            told = self._roster.commit(step, drawn, first)
            num_nonfinite = self._roster.stats.nonfinite_in_a_row
        self._deliver(told)
        if num_nonfinite >= self._config.max_nonfinite_in_a_row:
            raise ModelBroken(f"the model gave {num_nonfinite} requests in a row no finite logits")

    def _run(self) -> None:
        try:
            while self._death is None and not self._stopping:
                if not self.step():
                    self._idle()
            if self._death is None:
                self._finish()
        except Exception as error:
            reason = self._await_lost_rank()
            if reason is None:
                log.exception("the engine fails")
            self._die(error if reason is None else RankLost(reason))

    def _idle(self) -> None:
        beat_s = self._config.quiet_s if self._rechecks.has_blanks else self._config.idle_beat_s
        with self._changed:
            self._changed.wait_for(lambda: self._news or self._stopping, timeout=beat_s)
            if self._news or self._stopping:
                return
            blanks = self._rechecks.take_blanks()
        reason = self._lost_rank()
        if reason is not None:
            raise RankLost(reason)
        if blanks:
            self._check_blocks(blanks)
        elif self._comm.size > 1:
            self._comm.broadcast_ints(StepPlan(0, kind=Kind.IDLE).encode())

    def _finish(self) -> None:
        with self._changed:
            told = self._roster.settle()
            told += self._roster.fail_all("UNAVAILABLE", "the worker is stopping")
            _, waiting = self._rechecks.take()
        self._check_due({}, waiting)
        self._deliver(told)
        if self._comm.size > 1:
            self._comm.broadcast_ints(StepPlan(0, kind=Kind.STOP).encode())

    def _die(self, error: Exception) -> None:
        with self._changed:
            if self._death is not None:
                return
            self._death = error
            code = "UNAVAILABLE" if isinstance(error, RankLost) else "INTERNAL"
            told = self._roster.settle()
            told += self._roster.fail_all(code, f"the engine has ended: {error}")
            _, waiting = self._rechecks.take()
            self._tell()
        self._check_due({}, waiting)
        self._deliver(told)
        self._on_death(error)

    def _await_lost_rank(self) -> str | None:
        """Whether a lost rank is why the step failed: its end may be seen a little later."""
        waited = threading.Event()
        for _ in range(20):
            reason = self._lost_rank()
            if reason is not None or self._comm.size == 1 or self._death is not None:
                return reason
            waited.wait(self._config.lost_rank_grace_s / 20)
        return None

    def _deliver(self, told: Sequence[Delivery]) -> None:
        for request, output in told:
            try:
                request.on_output(output)
            except Exception:  # whoever listens must not take the others down
                log.exception("the listener of request %r fails", request.request_id)
                self.cancel(request)

    def _tell(self) -> None:
        self._news = True
        self._changed.notify_all()

    @property
    def _is_over(self) -> bool:
        return self._death is not None or self._stopping

    def _check_alive(self) -> None:
        if self._is_over:
            raise EngineStopped("the engine takes no more requests")

    def _queued_tokens(self) -> int:
        choices = (*self._scheduler.running, *self._scheduler.waiting)
        return sum(choice.num_pending for choice in choices)

    def _retry_after_ms(self) -> int:
        """About when the queue will have moved on."""
        predicted = self._queued_tokens() * self._gauge.prefill_ms_per_token
        return int(min(10_000, max(100, predicted)))
