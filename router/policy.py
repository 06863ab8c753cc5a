"""The routing decision: pure, synchronous, and explainable from its arguments.

Every candidate is a (prefill, decode) pair or decode alone, and costs predicted milliseconds. A
pair is there twice where prefill could fetch blocks from who holds them (`fetching`), and compute:

    queue         work ahead of this prompt on the replica that computes it
    fetch         blocks that another worker holds, taken from there, and those in host memory,
                  less what the queue hides
    compute       the prompt tokens that replica neither holds nor fetches, by its curve
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
millisecond. Ties go to who has not computed more than the others lately (`evenness`), then by
rendezvous hash of the prompt, so that equal routers choose alike and equal replicas share the
prompts. The winner is found without looking at every pair (`least_pair`); what all of them would
cost is worked out when somebody asks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf

import xxhash

from router.costs import (
    alone_part,
    alone_terms,
    hides_ms,
    pair_terms,
    prefill_part,
    shipping_ms,
    stream_part,
)
from router.fetching import fetch_for, fetch_ms, holders
from router.least_pair import Column, Row, least_pair
from router.refusals import (
    decode_refusal,
    over_bar,
    prefill_refusal,
    too_late,
    too_slow,
    usable_wires,
)
from router.ways import Candidate, Decision, Fetch, Pins, Prompt, Replica, Replicas, Weights


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

    Everything in whole tenths of a millisecond. Of equal costs the less busy prefill replica wins,
    then the higher rendezvous score, prefill's first.
    """

    def __init__(
        self, prompt: Prompt, replicas: Replicas, pins: Pins, weights: Weights, bar_ms: float
    ) -> None:
        self._prompt, self._replicas, self._pins = prompt, replicas, pins
        self._weights, self._bar_ms = weights, bar_ms
        self._unbounded = bar_ms == inf and prompt.left_ms == inf
        self._behind_prefill = weights.followers * replicas.followers(replicas.prefills)
        self._behind_decode = weights.followers * replicas.followers(replicas.decodes)
        seed = _seed(prompt.key)
        able = sorted(
            (each for each in replicas.decodes if not decode_refusal(prompt, each, pins)),
            key=lambda each: -_score(seed, each.name),
        )
        self._decodes = [each for each in able if not too_slow(prompt, each)]
        self._slow_decodes = [each for each in able if too_slow(prompt, each)]
        self._prefills = sorted(
            (each for each in replicas.prefills if not prefill_refusal(prompt, each, pins)),
            key=lambda each: (each.busier, -_score(seed, each.name)),
        )
        self._holders = holders(prompt, replicas, weights)
        self.num_computing = len(self._prefills) or len(self._decodes)

    def cheapest(self, over_bars: bool = False) -> Candidate | None:
        """`over_bars` lets those be chosen that have too much ahead."""
        prompt, weights = self._prompt, self._weights
        costs = [_tenths(sum(stream_part(prompt, each, weights))) for each in self._decodes]
        alone = self._alone(costs, over_bars)
        found = self._cheapest_pair(costs, over_bars)
        if found is None or (alone is not None and alone[0] < found[0]):
            return None if alone is None else self._candidate(None, self._decodes[alone[1]])
        return self._candidate(*found[1:])

    def _cheapest_pair(
        self, costs: Sequence[int], over_bars: bool
    ) -> tuple[int, Replica, Replica, Fetch | None] | None:
        """`costs` are what decodes cost as those that stream."""
        prompt, weights, behind = self._prompt, self._weights, self._behind_prefill
        rows: list[Row] = []
        starts: list[tuple[Replica, Fetch | None]] = []
        for each in self._prefills:
            for compute_ms, fetch in self._ways_to_compute(each):
                waits_ms = fetch_ms(prompt, each, weights, fetch)
                if self._may_compute(each, waits_ms + compute_ms, over_bars):
                    part = prefill_part(prompt, each, behind, weights, compute_ms, waits_ms)
                    rows.append(Row(_tenths(sum(part)), _tenths(hides_ms(prompt, compute_ms))))
                    starts.append((each, fetch))
        decodes, needs = self._decodes, self._needs([prefill for prefill, _ in starts])
        columns = [Column(cost, needs(each)) for each, cost in zip(decodes, costs, strict=True)]
        found = least_pair(
            rows,
            columns,
            lambda row, column: self._between(*starts[row], decodes[column], rows[row].hides),
            lambda row, column: self._fits(starts[row][0], decodes[column]),
        )
        if found is None:
            return None
        prefill, fetch = starts[found[1]]
        return found[0], prefill, decodes[found[2]], fetch

    def _ways_to_compute(self, prefill: Replica) -> Sequence[tuple[float, Fetch | None]]:
        """Without a fetch, and with the one there may be; first how long it computes."""
        whole_ms = self._prompt.compute_ms(prefill)
        fetch = fetch_for(self._prompt, prefill, whole_ms, self._holders, self._replicas)
        alone = (whole_ms, None)
        return (alone,) if fetch is None else (alone, (fetch.compute_ms, fetch))

    def late(self) -> tuple[Candidate, ...]:
        """One for each replica that could compute the prompt, or stream it, and would be late."""
        decodes = [*self._decodes, *self._slow_decodes]
        ways = [self._candidate(prefill, decodes[0]) for prefill in self._prefills if decodes]
        if not self._pins.prefill:
            ways += [self._candidate(None, decode) for decode in decodes]
        judged = [_admissible(self._prompt, each, self._pins, inf) for each in ways]
        return tuple(each for each in judged if each.late)

    def _alone(self, streaming: Sequence[int], over_bars: bool) -> tuple[int, int] | None:
        """(cost, decode) of the cheapest that computes the prompt by itself."""
        if self._pins.prefill:
            return None
        prompt, weights, behind = self._prompt, self._weights, self._behind_decode
        costs: list[tuple[int, int]] = []
        for at, (decode, cost) in enumerate(zip(self._decodes, streaming, strict=True)):
            compute_ms = prompt.compute_ms(decode)
            waits_ms = fetch_ms(prompt, decode, weights)
            if self._may_compute(decode, waits_ms + compute_ms, over_bars):
                part = alone_part(prompt, decode, behind, weights, compute_ms, waits_ms)
                costs.append((cost + _tenths(sum(part)), at))
        return min(costs, default=None)

    def _may_compute(self, replica: Replica, own_ms: float, over_bars: bool) -> bool:
        if self._unbounded:
            return True
        ttft_ms = replica.queue_ms + own_ms + replica.dispatch_ms
        if replica.measured and ttft_ms > self._prompt.left_ms:
            return False
        return over_bars or not over_bar(replica, self._pins, self._bar_ms)

    def _needs(self, prefills: Sequence[Replica]) -> Callable[[Replica], int]:
        """The least time on a link of what a decode replica lacks, from any of these."""
        # Blocks of another size round a prompt up to other lengths.
        sizes = list({each.block_size: each for each in prefills}.values())
        found: dict[tuple[int, int], int] = {}

        def needs(decode: Replica) -> int:
            key = (decode.matched_blocks, decode.block_size)
            if key not in found:
                lacking = min(
                    (self._prompt.shipped_bytes(each, decode) for each in sizes), default=0
                )
                found[key] = _tenths(self._replicas.fastest.ms(lacking)) if lacking else 0
            return found[key]

        return needs

    def _between(self, prefill: Replica, fetch: Fetch | None, decode: Replica, hides: int) -> int:
        """What only the pair decides."""
        link = self._replicas.links.get((prefill.name, decode.name), self._replicas.untried)
        link_ms, _, distance_ms = shipping_ms(
            self._prompt, prefill, decode, link, self._weights, fetch
        )
        return max(0, _tenths(link_ms) - hides) + _tenths(distance_ms)

    def _fits(self, prefill: Replica, decode: Replica) -> bool:
        refused = self._replicas.refused_pairs.get((prefill.name, decode.name))
        return not refused and not self._wires(prefill, decode)[1]

    def _candidate(
        self, prefill: Replica | None, decode: Replica, fetch: Fetch | None = None
    ) -> Candidate:
        prompt, weights = self._prompt, self._weights
        if prefill is None:
            terms = alone_terms(prompt, decode, self._behind_decode, weights)
            return Candidate(None, decode, terms=terms)
        link = self._replicas.links.get((prefill.name, decode.name), self._replicas.untried)
        terms = pair_terms(prompt, prefill, decode, link, self._behind_prefill, weights, fetch)
        wires = self._wires(prefill, decode)[0]
        return Candidate(prefill, decode, wires, terms, fetch=fetch)

    def _wires(self, prefill: Replica, decode: Replica) -> tuple[tuple[str, ...], str]:
        held = self._replicas.quarantined_wires.get((prefill.name, decode.name), ())
        return usable_wires(prefill, decode, self._pins, held)


def _candidates(
    prompt: Prompt, replicas: Replicas, pins: Pins, weights: Weights
) -> Iterator[Candidate]:
    behind_prefill = weights.followers * replicas.followers(replicas.prefills)
    behind_decode = weights.followers * replicas.followers(replicas.decodes)
    known = holders(prompt, replicas, weights)
    fetches = [
        fetch_for(prompt, each, prompt.compute_ms(each), known, replicas)
        for each in replicas.prefills
    ]
    for decode in replicas.decodes:
        alone = decode_refusal(prompt, decode, pins)
        if pins.prefill and not alone:
            alone = f"the request is pinned to prefill {pins.prefill}"
        terms = alone_terms(prompt, decode, behind_decode, weights)
        yield Candidate(None, decode, terms=terms, refused=alone)
        for prefill, fetch in zip(replicas.prefills, fetches, strict=True):
            pair = (prefill.name, decode.name)
            wires, unwired = usable_wires(
                prefill, decode, pins, replicas.quarantined_wires.get(pair, ())
            )
            refused = (
                decode_refusal(prompt, decode, pins)
                or prefill_refusal(prompt, prefill, pins)
                or replicas.refused_pairs.get(pair, "")
                or unwired
            )
            link = replicas.links.get(pair, replicas.untried)
            for way in (None, fetch) if fetch is not None else (None,):
                terms = pair_terms(prompt, prefill, decode, link, behind_prefill, weights, way)
                yield Candidate(prefill, decode, wires, terms, refused, fetch=way)


def _admissible(prompt: Prompt, candidate: Candidate, pins: Pins, bar_ms: float) -> Candidate:
    """The candidate, refused where it would be too late, or has too much to do already."""
    computing = candidate.computing
    if candidate.refused:
        return candidate
    if late := too_late(prompt, candidate):
        return replace(candidate, refused=late, late=True)
    if over_bar(computing, pins, bar_ms):
        return replace(
            candidate,
            refused=f"{computing.name} has {computing.queue_ms:.0f} ms of work ahead,"
            f" its bar is {bar_ms:.0f} ms",
            barred=True,
        )
    return candidate


def _rank(prompt: Prompt, candidate: Candidate) -> tuple[bool, int, int, int, int]:
    """Usable before refused, cheap before dear, less busy before busy, then by rendezvous."""
    prefill = candidate.prefill.name if candidate.prefill else ""
    seed = _seed(prompt.key)
    scores = _score(seed, prefill), _score(seed, candidate.decode.name)
    cost = _tenths(candidate.terms.cost_ms)
    return bool(candidate.refused), cost, _busier(candidate), -scores[0], -scores[1]


def _busier(candidate: Candidate) -> int:
    return candidate.prefill.busier if candidate.prefill else 0


def _tenths(ms: float) -> int:
    return round(10 * ms)


def _score(seed: int, name: str) -> int:
    """Of a prompt and a replica (rendezvous hashing); of nobody, the least."""
    return xxhash.xxh3_64_intdigest(name.encode(), seed=seed) if name else 0


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
        busier = _busier(second) > _busier(best)
        decided = "it was less busy lately" if busier else "the prompt's hash decided"
        return f"{best} costs {cost_ms:.1f} ms, as much as {second}: {decided}"
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
