"""The fleet at one moment, in the terms of the policy."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from prefix_index.index import Manifest, Role, WorkerRecord
from router import policy
from router.doubts import Party
from router.pace import Pace
from router.worker import Worker

NO_SPEED_YET_MS = 1.0  # per prompt token, until any worker has measured it
BYTES_PER_VALUE = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8}
PLANES = 2  # K and V
MAX_HOLDERS = 4  # that decode is told of


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one decision is made from, and the workers that its names stand for."""

    prompt: policy.Prompt
    replicas: policy.Replicas
    prefills: Mapping[str, Worker]
    decodes: Mapping[str, Worker]

    @property
    def available_tokens(self) -> int:
        """The most prompt tokens that any usable worker need not compute."""
        seen = [*self.replicas.prefills, *self.replicas.decodes]
        return max((self.held_tokens(each) for each in seen if not each.refused), default=0)

    def held_tokens(self, replica: policy.Replica) -> int:
        """The prompt tokens it need not compute."""
        return self.prompt.num_tokens - self.prompt.uncached_tokens(replica)

    def computing(self, candidate: policy.Candidate) -> Worker:
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


def take_snapshot(
    num_tokens: int,
    key: bytes,
    workers: Sequence[Worker],
    matched_tokens: Mapping[str, int],
    link_bytes_per_ms: Mapping[tuple[str, str], float],
    refused: Callable[[Party], str],
    pace: Pace,
) -> Snapshot:
    """`matched_tokens` is by worker name, link speeds by pair of instances.

    `refused` says what speaks against an instance or a pair of them, beyond their own state.
    """
    prefills = _by_name(workers, Role.PREFILL)
    decodes = _by_name(workers, Role.DECODE)
    shape = _shape([*decodes.values(), *prefills.values()])
    usual_ms = _usual_ms_per_token(workers)
    pairs = [(prefill, decode) for prefill in prefills.values() for decode in decodes.values()]

    def replica(worker: Worker) -> policy.Replica:
        why = worker.standing or refused(worker.record.instance)
        return _replica(worker, matched_tokens.get(worker.name, 0), why, usual_ms)

    replicas = policy.Replicas(
        prefills=[replica(worker) for worker in prefills.values()],
        decodes=[replica(worker) for worker in decodes.values()],
        refused_pairs={
            (prefill.name, decode.name): f"{prefill.name} and {decode.name}: {why}"
            for prefill, decode in pairs
            if (why := _mismatch(prefill, decode) or refused(_instances(prefill, decode)))
        },
        link_bytes_per_ms={
            (prefill.name, decode.name): speed
            for prefill, decode in pairs
            if (speed := link_bytes_per_ms.get(_instances(prefill, decode)))
        },
        prompts_per_ms=pace.prompts_per_ms,
        busy=pace.busy,
    )
    return Snapshot(_prompt(num_tokens, key, shape), replicas, prefills, decodes)


def _by_name(workers: Iterable[Worker], role: Role) -> dict[str, Worker]:
    """Of two lives seen at once, the later one."""
    chosen = sorted(workers, key=lambda worker: (worker.name, worker.record.epoch))
    return {worker.name: worker for worker in chosen if worker.record.role is role}


def _shape(workers: Iterable[Worker]) -> Manifest | None:
    """The geometry of a token's KV: that of the first worker that fits, decode first."""
    ordered = sorted(workers, key=lambda worker: bool(worker.unfit))
    return ordered[0].record.manifest if ordered else None


def _instances(prefill: Worker, decode: Worker) -> tuple[str, str]:
    return prefill.record.instance, decode.record.instance


def _mismatch(prefill: Worker, decode: Worker) -> str:
    return prefill.record.manifest.mismatch(decode.record.manifest) or ""


def _usual_ms_per_token(workers: Iterable[Worker]) -> float:
    """What to expect of a worker that has computed no prompt yet: what the others need."""
    measured = [each.record.load.prefill_ms_per_token for each in workers if not each.unfit]
    return mean([ms for ms in measured if ms > 0] or [NO_SPEED_YET_MS])


def _replica(
    worker: Worker, matched_tokens: int, refused: str, usual_ms_per_token: float
) -> policy.Replica:
    load, block_size = worker.record.load, max(1, worker.record.manifest.block_size)
    return policy.Replica(
        name=worker.name,
        ms_per_token=load.prefill_ms_per_token or usual_ms_per_token,
        block_size=block_size,
        queued_tokens=worker.foreign_tokens + worker.booked_tokens,
        matched_blocks=matched_tokens // block_size,
        running=max(load.running, worker.booked_requests),
        waiting=load.waiting,
        step_ms=load.decode_step_ms,
        free_blocks=load.free_blocks,
        total_blocks=load.total_blocks,
        wires=worker.record.manifest.wires,
        host=worker.record.manifest.host,
        refused=refused,
    )


def _prompt(num_tokens: int, key: bytes, shape: Manifest | None) -> policy.Prompt:
    if shape is None:
        return policy.Prompt(num_tokens, token_bytes=0, num_layers=1, key=key)
    cells = shape.num_layers * shape.num_kv_heads * PLANES
    value_bytes = BYTES_PER_VALUE.get(shape.dtype, 4)
    return policy.Prompt(
        num_tokens=num_tokens,
        token_bytes=cells * shape.head_dim * value_bytes,
        num_layers=shape.num_layers,
        key=key,
    )
