"""The fleet at one moment, in the terms of the policy."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf

from prefix_index.index import Manifest, WorkerRecord
from prefix_index.quarantine import may_fetch, wires_left
from prefix_index.worker_record import shared_wires
from router import ways
from router.curves import INSTANT, LinkCurve
from router.doubts import Party
from router.lazily import Lazily
from router.pace import Pace
from router.targets import NO_TARGETS, Targets
from router.worker import UNFETCHED, Link, Worker

BYTES_PER_VALUE = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8}
PLANES = 2  # K and V
MAX_HOLDERS = 4  # that decode is told of


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one decision is made from, and the workers that its names stand for."""

    prompt: ways.Prompt
    replicas: ways.Replicas
    prefills: Mapping[str, Worker]
    decodes: Mapping[str, Worker]

    @property
    def computers(self) -> Sequence[ways.Replica]:
        """Who could compute a prompt: prefill's, or where there is none of them, decode's."""
        return self.replicas.prefills or self.replicas.decodes

    @property
    def available_tokens(self) -> int:
        """The most prompt tokens that any usable worker need not compute."""
        seen = [*self.replicas.prefills, *self.replicas.decodes]
        return max((self.held_tokens(each) for each in seen if not each.refused), default=0)

    def held_tokens(self, replica: ways.Replica) -> int:
        """The prompt tokens it need not compute, as far as the index knows."""
        return self.prompt.held_tokens(replica)

    def worker(self, replica: ways.Replica) -> Worker:
        found = self.prefills.get(replica.name)
        return self.decodes[replica.name] if found is None else found

    def computing(self, candidate: ways.Candidate) -> Worker:
        """Who would compute the prompt."""
        if candidate.prefill is None:
            return self.decodes[candidate.decode.name]
        return self.prefills[candidate.prefill.name]

    def holders(self, *others: str) -> tuple[WorkerRecord, ...]:
        """Where blocks of the prompt can be had besides: those who hold most of them."""
        known = [*self.replicas.prefills, *self.replicas.decodes]
        holding = [each for each in known if each.matched_tokens and each.name not in others]
        best = sorted(holding, key=lambda each: -each.matched_tokens)[:MAX_HOLDERS]
        workers = {**self.prefills, **self.decodes}
        return tuple(workers[each.name].record for each in best)


@dataclass(frozen=True, slots=True)
class Asked:
    """What of a request the policy is told."""

    num_tokens: int
    key: bytes
    max_tokens: int = 0  # of each choice
    targets: Targets = NO_TARGETS
    session: tuple[str, str] | None = None  # where it was last
    left_ms: float = inf


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a prompt a worker holds, and will hold, from the root."""

    tokens: int = 0
    expected_tokens: int = 0
    host_tokens: int = 0  # of `tokens`: in host memory, not where the model computes


NO_MATCH = Match()


@dataclass(frozen=True, slots=True)
class State:
    """What is known besides the workers: links by pair of instances, and the curve of the others,
    and how prompts come.
    """

    links: Mapping[tuple[str, str], Link]
    untried: LinkCurve
    fastest: LinkCurve  # none of them takes less
    pace: Pace
    now: float
    fetches: Mapping[tuple[str, str], Link] = field(default_factory=dict)  # holder and fetcher
    unfetched: LinkCurve = UNFETCHED
    fastest_fetch: LinkCurve = INSTANT


def take_snapshot(
    asked: Asked,
    prefills: Mapping[str, Worker],
    decodes: Mapping[str, Worker],
    matched: Mapping[str, Match],
    state: State,
    refused: Mapping[Party, str],
) -> Snapshot:
    """Everything is by worker name.

    `refused` says what speaks against an instance or a pair of them, beyond their own state.
    """
    shape = _shape([*decodes.values(), *prefills.values()])

    def pairs() -> Iterable[tuple[str, str]]:
        return product(prefills, decodes)

    def against(pair: tuple[str, str]) -> str | None:
        prefill, decode = prefills[pair[0]], decodes[pair[1]]
        why = _mismatch(prefill, decode) or _wires_left(prefill, decode)[1]
        why = why or refused.get(_instances(prefill, decode), "")
        return f"{prefill.name} and {decode.name}: {why}" if why else None

    def quarantined(pair: tuple[str, str]) -> list[str] | None:
        decode = decodes[pair[1]]
        if not decode.record.load.quarantines:
            return None
        left, _ = _wires_left(prefills[pair[0]], decode)
        return [wire for wire in decode.record.manifest.wires if wire not in left]

    def link(pair: tuple[str, str]) -> ways.Link | None:
        known = state.links.get(_instances(prefills[pair[0]], decodes[pair[1]]))
        return ways.Link(known.curve, known.in_flight_bytes) if known else None

    everybody = {**prefills, **decodes}
    unfetched = ways.Link(state.unfetched)

    def ways_to_fetch() -> Iterable[tuple[str, str]]:
        return product(everybody, prefills)

    def fetch(pair: tuple[str, str]) -> ways.Link | None:
        holder, fetcher = everybody[pair[0]].record, prefills[pair[1]].record
        instances = holder.instance, fetcher.instance
        if instances in refused or not may_fetch(
            fetcher.load.quarantines, holder.name, holder.epoch
        ):
            return None
        known = state.fetches.get(instances)
        return ways.Link(known.curve, known.in_flight_bytes) if known else unfetched

    def replica(worker: Worker) -> ways.Replica:
        why = worker.standing or refused.get(worker.record.instance, "")
        match = matched.get(worker.record.name, NO_MATCH)
        return _replica(worker, match, why, asked.num_tokens, state.now)

    replicas = ways.Replicas(
        prefills=[replica(worker) for worker in prefills.values()],
        decodes=[replica(worker) for worker in decodes.values()],
        refused_pairs=Lazily(pairs, against),
        quarantined_wires=Lazily(pairs, quarantined),
        links=Lazily(pairs, link),
        untried=ways.Link(state.untried),
        fastest=state.fastest,
        fetches=Lazily(ways_to_fetch, fetch),
        fastest_fetch=state.fastest_fetch,
        prompts_per_ms=state.pace.prompts_per_ms,
        busy=state.pace.busy,
    )
    return Snapshot(_prompt(asked, shape, state.pace), replicas, prefills, decodes)


def _shape(workers: Sequence[Worker]) -> Manifest | None:
    """The geometry of a token's KV: that of the first worker that fits, decode first."""
    shapes = (each for each in workers if not each.unfit)
    first = next(shapes, workers[0] if workers else None)
    return first.record.manifest if first else None


def _instances(prefill: Worker, decode: Worker) -> tuple[str, str]:
    return prefill.record.instance, decode.record.instance


def _mismatch(prefill: Worker, decode: Worker) -> str:
    return prefill.record.manifest.mismatch(decode.record.manifest) or ""


def _wires_left(prefill: Worker, decode: Worker) -> tuple[list[str], str]:
    """Those of the pair's that decode does not have in quarantine, and when none is left, why."""
    wires = shared_wires(prefill.record.manifest, decode.record.manifest)
    against = decode.record.load.quarantines
    return wires_left(against, prefill.name, prefill.record.epoch, wires)


def _replica(
    worker: Worker, match: Match, refused: str, num_tokens: int, now: float
) -> ways.Replica:
    record = worker.record
    load, manifest = record.load, record.manifest
    block_size = max(1, manifest.block_size)
    curve, steps = worker.curve, worker.steps
    running = max(load.running, worker.booked_requests)
    joined_ms = steps.ms(running + 1, load.context_tokens + num_tokens) if steps else 0.0
    return ways.Replica(
        name=record.name,
        ms_per_token=curve.token_ms,
        prompt_ms=curve.prompt_ms,
        look_ms=curve.look_ms,
        dispatch_ms=worker.dispatch_ms,
        joined_step_ms=joined_ms,
        measured=worker.trusted(now),
        block_size=block_size,
        busier=worker.busier,
        queued_tokens=worker.foreign_tokens + worker.booked_tokens,
        queued_ms=worker.ahead_ms(now, curve.token_ms),
        matched_blocks=match.tokens // block_size,
        expected_blocks=match.expected_tokens // block_size,
        host_blocks=match.host_tokens // block_size,
        running=running,
        waiting=load.waiting,
        step_ms=load.decode_step_ms,
        free_blocks=load.free_blocks,
        total_blocks=load.total_blocks,
        wires=manifest.wires,
        host=manifest.host,
        node=manifest.node,
        zone=manifest.zone,
        naming=manifest.namespace,
        refused=refused,
    )


def _prompt(asked: Asked, shape: Manifest | None, pace: Pace) -> ways.Prompt:
    if shape is None:
        return ways.Prompt(asked.num_tokens, token_bytes=0, num_layers=1, key=asked.key)
    cells = shape.num_layers * shape.num_kv_heads * PLANES
    value_bytes = BYTES_PER_VALUE.get(shape.dtype, 4)
    return ways.Prompt(
        num_tokens=asked.num_tokens,
        token_bytes=cells * shape.head_dim * value_bytes,
        num_layers=shape.num_layers,
        key=asked.key,
        output_tokens=min(asked.max_tokens, pace.output_tokens),
        targets=asked.targets,
        session=asked.session,
        left_ms=asked.left_ms,
    )
