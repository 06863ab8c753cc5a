"""The routing decision: pure, synchronous, and explainable from its arguments.

Every candidate is a (prefill, decode) pair or decode alone, and costs predicted milliseconds:

    queue         work ahead of this prompt on the replica that computes it
    compute       the prompt tokens that replica does not hold, by its curve
    dispatch      what passes between its call and its answer besides
    link          moving the blocks decode lacks, behind those on their way, less what hides behind
                  the compute
    interference  what computing on decode takes from the sequences it is streaming
    followers     what computing takes from the prompts that will come before the queue is empty
    streaming     the steps of decode's batch with this sequence in it, for as many tokens as usual
    lateness      by how much the request's targets would be missed
    session       leaving the workers that its session was at
    distance      shipping from one node or zone to another
    admission     opening two legs instead of one, then a place and room in decode's batch

The terms add up to the cost. The cheapest candidate wins; costs are compared in tenths of a
millisecond, and ties go by rendezvous hash of the prompt, so that equal routers choose alike and
equal replicas share the prompts. The winner is found without looking at every pair (`least_pair`);
what all of them would cost is worked out when somebody asks.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

import xxhash

from prefix_index.worker_record import shared_wires
from router.curves import LinkCurve, looks_of
from router.least_pair import least_pair
from router.targets import NO_TARGETS, Targets

LEAST_IDLE = 0.1  # of the time; where the queues only grow, no mean is finite


@dataclass(frozen=True, slots=True)
class Replica:
    """What the decision needs to know of one live worker, at one moment."""

    name: str
    ms_per_token: float  # to compute a prompt, queue excluded
    block_size: int  # tokens; blocks are its own wherever they are counted here
    queued_tokens: int = 0  # prompt tokens ahead
    queued_ms: float | None = None  # what they take; None: by tokens
    prompt_ms: float = 0.0  # besides, for each prompt
    look_ms: float = 0.0  # and for each pair of a token to compute and one before it
    dispatch_ms: float = 0.0
    matched_blocks: int = 0  # of this prompt, from its root
    # And those that it will hold when this prompt's turn comes, as far as we know: what it computes
    # before. Costs count on them; nothing is promised for them.
    expected_blocks: int = 0
    host_blocks: int = 0  # of the matched ones: in host memory, to be loaded back first
    running: int = 0  # sequences it is streaming
    waiting: int = 0  # requests that have not joined its batch
    step_ms: float = 0.0  # of one decode step
    joined_step_ms: float = 0.0  # of one with this prompt's sequence in it; 0: not known
    measured: bool = False  # whether its speed was, or is only what is usual
    free_blocks: int = 0
    total_blocks: int = 0
    wires: tuple[str, ...] = ()  # preferred first
    host: str = ""
    node: str = ""  # empty: not known, and so not far from any
    zone: str = ""
    refused: str = ""  # why it cannot be used now

    @property
    def queue_ms(self) -> float:
        known = self.queued_ms
        return self.queued_tokens * self.ms_per_token if known is None else known

    def compute_ms(self, uncached_tokens: int, cached_tokens: int) -> float:
        looks = looks_of(uncached_tokens, cached_tokens)
        return self.prompt_ms + self.ms_per_token * uncached_tokens + self.look_ms * looks

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
    output_tokens: float = 0.0  # that are expected
    targets: Targets = NO_TARGETS
    session: tuple[str, str] | None = None  # the (prefill, decode) its session was at last
    left_ms: float = inf  # for the first token; what has no usable way within it is refused

    def uncached_tokens(self, replica: Replica) -> int:
        """Tokens that will be left for it to compute; the last one always is."""
        blocks = max(replica.matched_blocks, replica.expected_blocks)
        return self.num_tokens - self._reusable_tokens(replica, blocks)

    def held_tokens(self, replica: Replica) -> int:
        """Tokens that it need not compute, as far as the index knows."""
        return self._reusable_tokens(replica, replica.matched_blocks)

    def _reusable_tokens(self, replica: Replica, num_blocks: int) -> int:
        return min(num_blocks, (self.num_tokens - 1) // replica.block_size) * replica.block_size

    def compute_ms(self, replica: Replica) -> float:
        uncached = self.uncached_tokens(replica)
        return replica.compute_ms(uncached, self.num_tokens - uncached)

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
    # What each sequence more adds to a decode step, until the steps of its worker have a curve: 68
    # ms alone, 172 ms with sixteen (fp32, CPU).
    crowding: float = 0.1
    # Decode without room must first finish or evict somebody.
    full_pool_ms: float = 1000.0
    # What a client waits for each token of its answer, against its waiting for the first one.
    streaming: float = 1.0
    # What missing a target by a millisecond costs, for the first token or for all tokens together.
    lateness: float = 2.0
    # What a session's last worker may hold that nobody has announced yet: for each of the two.
    session_ms: float = 10.0
    # A shipment's round trips and contention on the way to another node, or out of the zone.
    node_ms: float = 1.0
    zone_ms: float = 10.0


@dataclass(frozen=True, slots=True)
class Link:
    """The way between a pair, at one moment."""

    curve: LinkCurve = field(default_factory=LinkCurve)
    in_flight_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Terms:
    queue_ms: float = 0.0
    compute_ms: float = 0.0
    link_ms: float = 0.0
    interference_ms: float = 0.0
    admission_ms: float = 0.0
    followers_ms: float = 0.0
    dispatch_ms: float = 0.0
    streaming_ms: float = 0.0
    lateness_ms: float = 0.0
    session_ms: float = 0.0
    distance_ms: float = 0.0

    @property
    def ttft_ms(self) -> float:
        """Of the cost, what this prompt itself waits for its first token."""
        return self.queue_ms + self.compute_ms + self.dispatch_ms

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
            "dispatch": self.dispatch_ms,
            "streaming": self.streaming_ms,
            "lateness": self.lateness_ms,
            "session": self.session_ms,
            "distance": self.distance_ms,
        }


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to serve the prompt. `prefill` is None where decode computes it itself."""

    prefill: Replica | None
    decode: Replica
    wires: tuple[str, ...] = ()  # in the order in which they are to be tried
    terms: Terms = field(default_factory=Terms)
    refused: str = ""
    barred: bool = False  # refused for no more than the work ahead, which will be done
    late: bool = False  # refused because it would take too long

    @property
    def wire(self) -> str:
        return self.wires[0] if self.wires else ""

    @property
    def computing(self) -> Replica:
        return self.prefill or self.decode

    def __str__(self) -> str:
        return f"{self.prefill.name} to {self.decode.name}" if self.prefill else self.decode.name


@dataclass(frozen=True, eq=False)
class Decision:
    """`chosen` is None when every candidate is refused, or there is none.

    Then `barred` is the cheapest of those who only have too much ahead, and where there are none,
    `late` is one for each who would be too late. The list of all is made when somebody asks.
    """

    chosen: Candidate | None
    barred: Candidate | None
    late: tuple[Candidate, ...]
    num_computing: int  # replicas that could compute the prompt, now or after some wait
    list_all: Callable[[], list[Candidate]]
    why: Callable[[Sequence[Candidate]], str]

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """The chosen one first, then the cheapest, the refused ones last."""
        chosen, listed = self.chosen, self.list_all()
        if chosen is None:
            return tuple(listed)
        return (chosen, *(each for each in listed if str(each) != str(chosen)))

    @cached_property
    def reason(self) -> str:
        return self.why(self.candidates)


@dataclass(frozen=True, slots=True)
class Replicas:
    """The live workers at one moment, and what is known of the ways between them."""

    prefills: Sequence[Replica]
    decodes: Sequence[Replica]
    refused_pairs: Mapping[tuple[str, str], str] = field(default_factory=dict)
    links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    untried: Link = field(default_factory=Link)  # what all other links are taken for
    prompts_per_ms: float = 0.0  # that come, to all of them together
    busy: float = 0.0  # how many prefill replicas they keep computing
    quarantined_wires: Mapping[tuple[str, str], Collection[str]] = field(default_factory=dict)

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
    prompt: Prompt,
    replicas: Replicas,
    pins: Pins | None = None,
    weights: Weights | None = None,
    bar_ms: float = inf,
) -> Decision:
    """Pick the cheapest usable way to serve `prompt`, and say what every other would cost.

    A replica with more than `bar_ms` of work ahead takes nothing more, unless the request is pinned
    to it.
    """
    pins, weights = pins or Pins(), weights or Weights()
    search = _Search(prompt, replicas, pins, weights, bar_ms)
    chosen = search.cheapest()
    barred = search.cheapest(over_bars=True) if chosen is None else None

    def list_all() -> list[Candidate]:
        ways = _candidates(prompt, replicas, pins, weights)
        admissible = (_admissible(prompt, each, pins, bar_ms) for each in ways)
        return sorted(admissible, key=lambda each: _rank(prompt, each))

    def why(candidates: Sequence[Candidate]) -> str:
        usable = [each for each in candidates if not each.refused]
        return _why(usable) if usable else _why_none(replicas, candidates)

    late = () if chosen or barred else search.late()
    return Decision(chosen, barred, late, search.num_computing, list_all, why)


class _Search:
    """The cheapest way, from what each replica costs by itself; few pairs are looked at.

    Everything in whole tenths of a millisecond. Of equal costs the higher rendezvous score wins,
    prefill's first.
    """

    def __init__(
        self, prompt: Prompt, replicas: Replicas, pins: Pins, weights: Weights, bar_ms: float
    ) -> None:
        self._prompt, self._replicas, self._pins = prompt, replicas, pins
        self._weights, self._bar_ms = weights, bar_ms
        self._behind_prefill = weights.followers * replicas.followers(replicas.prefills)
        self._behind_decode = weights.followers * replicas.followers(replicas.decodes)
        key = prompt.key
        able = sorted(
            (each for each in replicas.decodes if not _decode_refusal(prompt, each, pins)),
            key=lambda each: -_score(key, each.name),
        )
        self._decodes = [each for each in able if not _too_slow(prompt, each)]
        self._slow_decodes = [each for each in able if _too_slow(prompt, each)]
        self._prefills = sorted(
            (each for each in replicas.prefills if not _prefill_refusal(prompt, each, pins)),
            key=lambda each: -_score(key, each.name),
        )
        self.num_computing = len(self._prefills) or len(self._decodes)

    def cheapest(self, over_bars: bool = False) -> Candidate | None:
        """`over_bars` lets those be chosen that have too much ahead."""
        columns = [_tenths(self._stream_ms(each)) for each in self._decodes]
        alone = self._alone(columns, over_bars)
        prefills = [each for each in self._prefills if self._may_compute(each, over_bars)]
        rows = [_tenths(self._prefill_ms(each)) for each in prefills]
        found = least_pair(
            rows, columns, lambda row, column: self._pair(prefills[row], self._decodes[column])
        )
        if found is None or (alone is not None and alone[0] < found[0]):
            return None if alone is None else self._candidate(None, self._decodes[alone[1]])
        return self._candidate(prefills[found[1]], self._decodes[found[2]])

    def late(self) -> tuple[Candidate, ...]:
        """One for each replica that could compute the prompt, or stream it, and would be late."""
        decodes = [*self._decodes, *self._slow_decodes]
        ways = [self._candidate(prefill, decodes[0]) for prefill in self._prefills if decodes]
        if not self._pins.prefill:
            ways += [self._candidate(None, decode) for decode in decodes]
        judged = [_admissible(self._prompt, each, self._pins, inf) for each in ways]
        return tuple(each for each in judged if each.late)

    def _alone(self, columns: Sequence[int], over_bars: bool) -> tuple[int, int] | None:
        """(cost, decode) of the cheapest that computes the prompt by itself."""
        if self._pins.prefill:
            return None
        costs = [
            (column + _tenths(self._compute_here_ms(decode)), at)
            for at, (decode, column) in enumerate(zip(self._decodes, columns, strict=True))
            if self._may_compute(decode, over_bars)
        ]
        return min(costs, default=None)

    def _may_compute(self, replica: Replica, over_bars: bool) -> bool:
        if replica.measured and self._ttft_ms(replica) > self._prompt.left_ms:
            return False
        return over_bars or not _over_bar(replica, self._pins, self._bar_ms)

    def _ttft_ms(self, replica: Replica) -> float:
        return replica.queue_ms + self._prompt.compute_ms(replica) + replica.dispatch_ms

    def _prefill_ms(self, prefill: Replica) -> float:
        """Of a pair, what this prefill replica decides."""
        prompt, weights = self._prompt, self._weights
        compute_ms = prompt.compute_ms(prefill)
        return (
            prefill.queue_ms
            + compute_ms * (1 + self._behind_prefill)
            + prefill.dispatch_ms
            + weights.handoff_ms
            + _late_first_ms(prompt, prefill, compute_ms, weights)
            + _left_prefill_ms(prompt, prefill, weights)
        )

    def _stream_ms(self, decode: Replica) -> float:
        """Of any way, what this decode replica decides as the one that streams."""
        prompt, weights = self._prompt, self._weights
        return (
            _wait_ms(prompt, decode, weights)
            + weights.streaming * prompt.output_tokens * decode.joined_step_ms
            + _late_tokens_ms(prompt, decode, weights)
            + _left_decode_ms(prompt, decode, weights)
        )

    def _compute_here_ms(self, decode: Replica) -> float:
        """Of decode alone, what computing adds to streaming."""
        prompt, weights = self._prompt, self._weights
        compute_ms = prompt.compute_ms(decode)
        beside = weights.interference * (decode.running + 1)
        return (
            decode.queue_ms
            + compute_ms * (1 + beside + self._behind_decode)
            + decode.dispatch_ms
            + _late_first_ms(prompt, decode, compute_ms, weights)
        )

    def _pair(self, prefill: Replica, decode: Replica) -> int | None:
        """What only the pair decides; None where it cannot be used."""
        pair = (prefill.name, decode.name)
        if self._replicas.refused_pairs.get(pair) or self._wires(prefill, decode)[1]:
            return None
        link = self._replicas.links.get(pair, self._replicas.untried)
        link_ms, distance_ms = _link_ms(self._prompt, prefill, decode, link, self._weights)
        return _tenths(link_ms + distance_ms)

    def _candidate(self, prefill: Replica | None, decode: Replica) -> Candidate:
        prompt, weights = self._prompt, self._weights
        if prefill is None:
            terms = _alone_terms(prompt, decode, self._behind_decode, weights)
            return Candidate(None, decode, terms=terms)
        link = self._replicas.links.get((prefill.name, decode.name), self._replicas.untried)
        terms = _pair_terms(prompt, prefill, decode, link, self._behind_prefill, weights)
        return Candidate(prefill, decode, self._wires(prefill, decode)[0], terms)

    def _wires(self, prefill: Replica, decode: Replica) -> tuple[tuple[str, ...], str]:
        held = self._replicas.quarantined_wires.get((prefill.name, decode.name), ())
        return _wires(prefill, decode, self._pins, held)


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
            wires, unwired = _wires(prefill, decode, pins, replicas.quarantined_wires.get(pair, ()))
            refused = (
                _decode_refusal(prompt, decode, pins)
                or _prefill_refusal(prompt, prefill, pins)
                or replicas.refused_pairs.get(pair, "")
                or unwired
            )
            link = replicas.links.get(pair, replicas.untried)
            terms = _pair_terms(prompt, prefill, decode, link, behind_prefill, weights)
            yield Candidate(prefill, decode, wires, terms, refused)


def _admissible(prompt: Prompt, candidate: Candidate, pins: Pins, bar_ms: float) -> Candidate:
    """The candidate, refused where it would be too late, or has too much to do already."""
    computing = candidate.computing
    if candidate.refused:
        return candidate
    if late := _too_late(prompt, candidate):
        return replace(candidate, refused=late, late=True)
    if _over_bar(computing, pins, bar_ms):
        return replace(
            candidate,
            refused=f"{computing.name} has {computing.queue_ms:.0f} ms of work ahead,"
            f" its bar is {bar_ms:.0f} ms",
            barred=True,
        )
    return candidate


def _too_late(prompt: Prompt, candidate: Candidate) -> str:
    """Why it cannot keep to what the request insists on, as far as its speed was measured."""
    ttft_ms, targets = candidate.terms.ttft_ms, prompt.targets
    if ttft_ms > prompt.left_ms and candidate.computing.measured:
        return (
            f"{candidate.computing.name} would take {ttft_ms:.0f} ms to the first token,"
            f" {max(0.0, prompt.left_ms):.0f} ms are left"
        )
    if _too_slow(prompt, candidate.decode):
        return (
            f"{candidate.decode.name} would take {candidate.decode.joined_step_ms:.1f} ms"
            f" for each token, the target is {targets.token_ms:g} ms"
        )
    return ""


def _too_slow(prompt: Prompt, decode: Replica) -> bool:
    """Whether its steps are slower than the request insists on."""
    targets = prompt.targets
    return targets.strict and 0 < targets.token_ms < decode.joined_step_ms


def _over_bar(replica: Replica, pins: Pins, bar_ms: float) -> bool:
    return replica.queue_ms > bar_ms and replica.name not in (pins.prefill, pins.decode)


def _late_first_ms(
    prompt: Prompt, computing: Replica, compute_ms: float, weights: Weights
) -> float:
    target_ms = prompt.targets.ttft_ms
    if not target_ms:
        return 0.0
    ttft_ms = computing.queue_ms + compute_ms + computing.dispatch_ms
    return weights.lateness * max(0.0, ttft_ms - target_ms)


def _late_tokens_ms(prompt: Prompt, decode: Replica, weights: Weights) -> float:
    target_ms = prompt.targets.token_ms
    if not target_ms:
        return 0.0
    late_ms = max(0.0, decode.joined_step_ms - target_ms)
    return weights.lateness * prompt.output_tokens * late_ms


def _left_prefill_ms(prompt: Prompt, prefill: Replica, weights: Weights) -> float:
    """For leaving the one that its session was at."""
    moved = prompt.session is not None and prompt.session[0] not in ("", prefill.name)
    return weights.session_ms * moved


def _left_decode_ms(prompt: Prompt, decode: Replica, weights: Weights) -> float:
    moved = prompt.session is not None and prompt.session[1] != decode.name
    return weights.session_ms * moved


def _link_ms(
    prompt: Prompt, prefill: Replica, decode: Replica, link: Link, weights: Weights
) -> tuple[float, float]:
    """What is not hidden of the shipment, and how far it goes."""
    num_bytes = prompt.shipped_bytes(prefill, decode)
    if not num_bytes:
        return 0.0, 0.0
    link_ms = link.curve.ms(num_bytes, link.in_flight_bytes)
    # Layer by layer: all but the first layer's compute can hide the sending of the one before.
    hidden_ms = prompt.compute_ms(prefill) * (prompt.num_layers - 1) / prompt.num_layers
    return max(0.0, link_ms - hidden_ms), _distance_ms(prefill, decode, weights)


def _pair_terms(
    prompt: Prompt,
    prefill: Replica,
    decode: Replica,
    link: Link,
    followers: float,
    weights: Weights,
) -> Terms:
    compute_ms = prompt.compute_ms(prefill)
    link_ms, distance_ms = _link_ms(prompt, prefill, decode, link, weights)
    late_ms = _late_first_ms(prompt, prefill, compute_ms, weights)
    left_ms = _left_prefill_ms(prompt, prefill, weights)
    return Terms(
        queue_ms=prefill.queue_ms,
        compute_ms=compute_ms,
        dispatch_ms=prefill.dispatch_ms,
        link_ms=link_ms,
        admission_ms=weights.handoff_ms + _wait_ms(prompt, decode, weights),
        followers_ms=followers * compute_ms,
        streaming_ms=weights.streaming * prompt.output_tokens * decode.joined_step_ms,
        lateness_ms=late_ms + _late_tokens_ms(prompt, decode, weights),
        session_ms=left_ms + _left_decode_ms(prompt, decode, weights),
        distance_ms=distance_ms,
    )


def _alone_terms(prompt: Prompt, decode: Replica, followers: float, weights: Weights) -> Terms:
    compute_ms = prompt.compute_ms(decode)
    late_ms = _late_first_ms(prompt, decode, compute_ms, weights)
    return Terms(
        queue_ms=decode.queue_ms,
        compute_ms=compute_ms,
        dispatch_ms=decode.dispatch_ms,
        interference_ms=weights.interference * compute_ms * (decode.running + 1),
        admission_ms=_wait_ms(prompt, decode, weights),
        followers_ms=followers * compute_ms,
        streaming_ms=weights.streaming * prompt.output_tokens * decode.joined_step_ms,
        lateness_ms=late_ms + _late_tokens_ms(prompt, decode, weights),
        session_ms=_left_decode_ms(prompt, decode, weights),
    )


def _distance_ms(prefill: Replica, decode: Replica, weights: Weights) -> float:
    """Of labels that both have and that differ, the widest counts."""
    if prefill.zone and decode.zone and prefill.zone != decode.zone:
        return weights.zone_ms
    if prefill.node and decode.node and prefill.node != decode.node:
        return weights.node_ms
    return 0.0


def _wait_ms(prompt: Prompt, decode: Replica, weights: Weights) -> float:
    """Until decode's first own token: a step for each that waits, its own, and room for its KV."""
    lacking = max(0, decode.blocks_for(prompt.num_tokens) - decode.matched_blocks)
    full_ms = weights.full_pool_ms if lacking > decode.free_blocks else 0.0
    if decode.joined_step_ms:
        return (decode.waiting + 1) * decode.joined_step_ms + full_ms
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


def _wires(
    prefill: Replica, decode: Replica, pins: Pins, quarantined: Collection[str]
) -> tuple[tuple[str, ...], str]:
    """The wires this pair may use, or why there is none."""
    shared = shared_wires(prefill, decode)
    if pins.wire:
        shared = [wire for wire in shared if wire == pins.wire]
    left = tuple(wire for wire in shared if wire not in quarantined)
    if left:
        return left, ""
    if shared:
        names = " and ".join(shared)
        return (), f"{prefill.name} and {decode.name} have {names} in quarantine"
    asked = f"the wire {pins.wire} that the request asks for" if pins.wire else "a wire in common"
    return (), (
        f"{prefill.name} ({', '.join(prefill.wires)}) and {decode.name}"
        f" ({', '.join(decode.wires)}) do not have {asked}"
    )


def _rank(prompt: Prompt, candidate: Candidate) -> tuple[bool, int, int, int]:
    """Usable before refused, cheap before dear, then the higher rendezvous scores."""
    prefill = candidate.prefill.name if candidate.prefill else ""
    scores = _score(prompt.key, prefill), _score(prompt.key, candidate.decode.name)
    return bool(candidate.refused), _tenths(candidate.terms.cost_ms), -scores[0], -scores[1]


def _tenths(ms: float) -> int:
    return round(10 * ms)


def _score(key: bytes, name: str) -> int:
    """Of a prompt and a replica (rendezvous hashing); of nobody, the least."""
    return xxhash.xxh3_64_intdigest(name.encode(), seed=_seed(key)) if name else 0


def _seed(key: bytes) -> int:
    return int.from_bytes(key[:8], "little")


def _why(usable: Sequence[Candidate]) -> str:
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
