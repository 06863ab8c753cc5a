"""The routing decision: pure, synchronous, and explainable from its arguments.

Every candidate is a (prefill, decode) pair or decode alone, and costs predicted milliseconds:

    queue         work ahead of this prompt on the replica that computes it
    compute       the prompt tokens that replica does not hold
    link          moving the blocks decode lacks, less what hides behind the compute
    interference  what computing on decode takes from the sequences it is streaming
    followers     what computing takes from the prompts that will come before the queue is empty
    admission     opening two legs instead of one, then a place and room in decode's batch

The terms add up to the cost. The cheapest candidate wins; costs are compared in tenths of a
millisecond, and ties go by rendezvous hash of the prompt, so that equal routers choose alike and
equal replicas share the prompts.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prefix_index.worker_record import shared_wires

LEAST_IDLE = 0.1  # of the time; where the queues only grow, no mean is finite


@dataclass(frozen=True, slots=True)
class Replica:
    """What the decision needs to know of one live worker, at one moment."""

    name: str
    ms_per_token: float  # to compute a prompt, queue excluded
    block_size: int  # tokens; blocks are its own wherever they are counted here
    queued_tokens: int = 0  # prompt tokens ahead
    matched_blocks: int = 0  # of this prompt, from its root
    running: int = 0  # sequences it is streaming
    waiting: int = 0  # requests that have not joined its batch
    step_ms: float = 0.0  # of one decode step
    free_blocks: int = 0
    total_blocks: int = 0
    wires: tuple[str, ...] = ()  # preferred first
    host: str = ""
    refused: str = ""  # why it cannot be used now

    @property
    def queue_ms(self) -> float:
        return self.queued_tokens * self.ms_per_token

    @property
    def matched_tokens(self) -> int:
        return self.matched_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks their KV fills, the partial one included."""
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, as the policy sees it. `key` is any digest of its tokens; it breaks ties."""

    num_tokens: int
    token_bytes: int  # KV of one token, over all layers and heads
    num_layers: int
    key: bytes = b""

    def uncached_tokens(self, replica: Replica) -> int:
        """Tokens left for it to compute; the last one always is."""
        reusable = min(replica.matched_blocks, (self.num_tokens - 1) // replica.block_size)
        return self.num_tokens - reusable * replica.block_size

    def shipped_bytes(self, prefill: Replica, decode: Replica) -> int:
        """What decode lacks, in blocks as large as the smaller of theirs."""
        unit = min(prefill.block_size, decode.block_size)
        whole_tokens = -(-self.num_tokens // unit) * unit
        return max(0, whole_tokens - decode.matched_tokens) * self.token_bytes


@dataclass(frozen=True, slots=True)
class Pins:
    """What the request itself prescribes; empty prescribes nothing."""

    prefill: str = ""
    decode: str = ""
    wire: str = ""
    no_prefill: bool = False


@dataclass(frozen=True, slots=True)
class Weights:
    """What an operator may turn. Defaults are for replicas on one host or one fast network."""

    # Computing on decode delays every sequence it streams, and the one that will join meanwhile.
    interference: float = 1.0
    # What others will wait for this prompt's computing, against its own waiting.
    followers: float = 1.0
    # A second leg, a reservation and a commit: about ten gRPC messages of 0.5 ms.
    handoff_ms: float = 5.0
    # What each sequence more adds to a decode step: 68 ms alone, 172 ms with sixteen (fp32, CPU).
    crowding: float = 0.1
    # Decode without room must first finish or evict somebody.
    full_pool_ms: float = 1000.0
    link_bytes_per_ms: float = 500_000.0  # until the first shipment over a link was measured


@dataclass(frozen=True, slots=True)
class Terms:
    queue_ms: float = 0.0
    compute_ms: float = 0.0
    link_ms: float = 0.0
    interference_ms: float = 0.0
    admission_ms: float = 0.0
    followers_ms: float = 0.0

    @property
    def ttft_ms(self) -> float:
        """Of the cost, what this prompt itself waits for its first token."""
        return self.queue_ms + self.compute_ms

    @property
    def cost_ms(self) -> float:
        return sum(self.named().values())

    def named(self) -> dict[str, float]:
        return {
            "queue": self.queue_ms,
            "compute": self.compute_ms,
            "link": self.link_ms,
            "interference": self.interference_ms,
            "admission": self.admission_ms,
            "followers": self.followers_ms,
        }


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to serve the prompt. `prefill` is None where decode computes it itself."""

    prefill: Replica | None
    decode: Replica
    wire: str = ""
    terms: Terms = field(default_factory=Terms)
    refused: str = ""

    @property
    def computing(self) -> Replica:
        return self.prefill or self.decode

    def __str__(self) -> str:
        return f"{self.prefill.name} to {self.decode.name}" if self.prefill else self.decode.name


@dataclass(frozen=True, slots=True)
class Decision:
    """`chosen` is None when every candidate is refused, or there is none."""

    chosen: Candidate | None
    reason: str
    candidates: tuple[Candidate, ...]  # cheapest first, the refused ones last


@dataclass(frozen=True, slots=True)
class Replicas:
    """The live workers at one moment, and what is known of the ways between them."""

    prefills: Sequence[Replica]
    decodes: Sequence[Replica]
    refused_pairs: Mapping[tuple[str, str], str] = field(default_factory=dict)
    link_bytes_per_ms: Mapping[tuple[str, str], float] = field(default_factory=dict)
    prompts_per_ms: float = 0.0  # that come, to all of them together
    busy: float = 0.0  # how many prefill replicas they keep computing

    def followers(self, role: Sequence[Replica]) -> float:
        """Prompts that will come to one replica of `role` before what it has to do is done.

        Work that is added lengthens the busy period it falls into, by itself and by what comes
        meanwhile; whoever comes until its end waits that much longer. (A busy period that begins
        with work w lasts w / (1 - utilisation) in the mean: Kleinrock, Queueing Systems 1, 5.8.)
        Prompts to come are routed around a long queue as this one is, so that work anywhere is
        everybody's: the mean queue counts, not the replica's own.
        """
        if not role:
            return 0.0
        ahead_ms = sum(each.queue_ms for each in role) / len(role)
        own_ms = self.busy / self.prompts_per_ms if self.prompts_per_ms else 0.0
        idle = max(LEAST_IDLE, 1 - self.busy / max(1, len(self.prefills)))
        return self.prompts_per_ms / len(role) * (ahead_ms + own_ms / 2) / idle


def choose(
    prompt: Prompt, replicas: Replicas, pins: Pins | None = None, weights: Weights | None = None
) -> Decision:
    """Pick the cheapest usable way to serve `prompt`, and say what every other would cost."""
    pins, weights = pins or Pins(), weights or Weights()
    candidates = sorted(
        _candidates(prompt, replicas, pins, weights), key=lambda each: _rank(prompt, each)
    )
    usable = [each for each in candidates if not each.refused]
    if not usable:
        return Decision(None, _why_none(replicas, candidates), tuple(candidates))
    return Decision(usable[0], _why(prompt, usable), tuple(candidates))


def _candidates(
    prompt: Prompt, replicas: Replicas, pins: Pins, weights: Weights
) -> Iterator[Candidate]:
    behind_prefill = weights.followers * replicas.followers(replicas.prefills)
    behind_decode = weights.followers * replicas.followers(replicas.decodes)
    for decode in replicas.decodes:
        alone = _decode_refusal(prompt, decode, pins)
        if pins.prefill and not alone:
            alone = f"the request is pinned to prefill {pins.prefill}"
        terms = _alone_terms(prompt, decode, behind_decode, weights)
        yield Candidate(None, decode, terms=terms, refused=alone)
        for prefill in replicas.prefills:
            pair = (prefill.name, decode.name)
            wire, unwired = _shared_wire(prefill, decode, pins)
            refused = (
                _decode_refusal(prompt, decode, pins)
                or _prefill_refusal(prompt, prefill, pins)
                or replicas.refused_pairs.get(pair, "")
                or unwired
            )
            speed = replicas.link_bytes_per_ms.get(pair, weights.link_bytes_per_ms)
            terms = _pair_terms(prompt, prefill, decode, speed, behind_prefill, weights)
            yield Candidate(prefill, decode, wire, terms, refused)


def _pair_terms(
    prompt: Prompt,
    prefill: Replica,
    decode: Replica,
    link_bytes_per_ms: float,
    followers: float,
    weights: Weights,
) -> Terms:
    compute_ms = prompt.uncached_tokens(prefill) * prefill.ms_per_token
    link_ms = prompt.shipped_bytes(prefill, decode) / link_bytes_per_ms
    # Layer by layer: all but the first layer's compute can hide the sending of the one before.
    hidden_ms = compute_ms * (prompt.num_layers - 1) / prompt.num_layers
    return Terms(
        queue_ms=prefill.queue_ms,
        compute_ms=compute_ms,
        link_ms=max(0.0, link_ms - hidden_ms),
        admission_ms=weights.handoff_ms + _wait_ms(prompt, decode, weights),
        followers_ms=followers * compute_ms,
    )


def _alone_terms(prompt: Prompt, decode: Replica, followers: float, weights: Weights) -> Terms:
    compute_ms = prompt.uncached_tokens(decode) * decode.ms_per_token
    return Terms(
        queue_ms=decode.queue_ms,
        compute_ms=compute_ms,
        interference_ms=weights.interference * compute_ms * (decode.running + 1),
        admission_ms=_wait_ms(prompt, decode, weights),
        followers_ms=followers * compute_ms,
    )


def _wait_ms(prompt: Prompt, decode: Replica, weights: Weights) -> float:
    """Until decode's first own token: a step for each that waits, its own, and room for its KV."""
    lacking = max(0, decode.blocks_for(prompt.num_tokens) - decode.matched_blocks)
    full_ms = weights.full_pool_ms if lacking > decode.free_blocks else 0.0
    steps = decode.waiting + 1 + weights.crowding * decode.running
    return steps * decode.step_ms + full_ms


def _decode_refusal(prompt: Prompt, decode: Replica, pins: Pins) -> str:
    if decode.refused:
        return f"{decode.name} {decode.refused}"
    if pins.decode not in ("", decode.name):
        return f"the request is pinned to decode {pins.decode}"
    return _too_small(prompt, decode)


def _prefill_refusal(prompt: Prompt, prefill: Replica, pins: Pins) -> str:
    if prefill.refused:
        return f"{prefill.name} {prefill.refused}"
    if pins.no_prefill:
        return "the request asks for decode alone"
    if pins.prefill not in ("", prefill.name):
        return f"the request is pinned to prefill {pins.prefill}"
    return _too_small(prompt, prefill)


def _too_small(prompt: Prompt, replica: Replica) -> str:
    num_blocks = replica.blocks_for(prompt.num_tokens)
    if num_blocks <= replica.total_blocks:
        return ""
    return f"{replica.name} has {replica.total_blocks} blocks in all, the prompt needs {num_blocks}"


def _shared_wire(prefill: Replica, decode: Replica, pins: Pins) -> tuple[str, str]:
    """The wire this pair would use, or why there is none."""
    shared = shared_wires(prefill, decode)
    if pins.wire:
        shared = [wire for wire in shared if wire == pins.wire]
    if shared:
        return shared[0], ""
    asked = f"the wire {pins.wire} that the request asks for" if pins.wire else "a wire in common"
    return "", (
        f"{prefill.name} ({', '.join(prefill.wires)}) and {decode.name}"
        f" ({', '.join(decode.wires)}) do not have {asked}"
    )


def _rank(prompt: Prompt, candidate: Candidate) -> tuple[bool, int, int, str]:
    """Usable before refused, cheap before dear, then the higher rendezvous score."""
    tenths_of_ms = round(candidate.terms.cost_ms * 10)
    score = _rendezvous(prompt.key, candidate)
    return bool(candidate.refused), tenths_of_ms, -score, str(candidate)


def _rendezvous(key: bytes, candidate: Candidate) -> int:
    digest = hashlib.blake2b(key, digest_size=8, person=b"kvferry.tie")
    digest.update(str(candidate).encode())
    return int.from_bytes(digest.digest(), "little")


def _why(prompt: Prompt, usable: Sequence[Candidate]) -> str:
    best = usable[0]
    cost_ms = best.terms.cost_ms
    if len(usable) == 1:
        return f"{best} is the only usable choice, at {cost_ms:.1f} ms"
    second = usable[1]
    gap_ms = second.terms.cost_ms - cost_ms
    if abs(gap_ms) < 0.1:
        return f"{best} costs {cost_ms:.1f} ms, as much as {second}: the prompt's hash decided"
    theirs, ours = second.terms.named(), best.terms.named()
    term = max(ours, key=lambda name: theirs[name] - ours[name])
    return (
        f"{best} costs {cost_ms:.1f} ms, {gap_ms:.1f} ms less than {second},"
        f" mostly for {theirs[term] - ours[term]:.1f} ms less {term}"
    )


def _why_none(replicas: Replicas, refused: Sequence[Candidate]) -> str:
    if not replicas.decodes:
        return "no decode replica is live"
    reasons = list(dict.fromkeys(each.refused for each in refused))
    return "no usable replica: " + "; ".join(reasons[:4])
