"""The honest hit rate: where every prompt token that could have been reused was lost, and why.

Five numbers that only shrink, all in prompt tokens:

    oracle     some prompt of this tenant that was routed before had these tokens: what a cache
               without end would give
    available  some usable worker holds them
    captured   the chosen pair holds them
    promised   whoever of the pair computes the prompt holds them
    delivered  it did hold them, and nobody computed them

Beside them stand those that were `fetched`: whoever computes the prompt did not hold them, and took
them from another worker. Nobody computed these either, and yet they are no hits: they cost a call,
and the bytes. They follow what was delivered, and are lost to nothing.

A worker decides what it really holds, so it may deliver more than the index knew; then the numbers
above are raised to what was delivered, and what was available to that and what was fetched: nobody
can deliver what was not there. So for each request
`prompt == delivered + fetched + sum(lost.values())`, and no loss is negative.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

KINDS = ("prompt", "oracle", "available", "captured", "promised", "delivered")
FETCHED = "fetched"


class Loss(Enum):
    """Why a token was computed; the first that applies."""

    NEW = "never seen"  # not a token of the oracle's
    TENANT = "tenant wall"  # only others have sent it, and theirs is not shared
    EVICTED = "evicted"  # was announced once, or should have been by now
    LAG = "event lag"  # being computed, or computed so lately that nobody has told us
    EPOCH = "epoch"  # the life that held it is over
    LOAD = "load"  # another worker held it, and cost more
    PAIR = "pair"  # decode holds it, prefill computed it nevertheless
    STALE = "stale index"  # promised by the index, not there


@dataclass(frozen=True, slots=True)
class HitRate:
    """Of one request, or added up over many."""

    prompt: int = 0
    oracle: int = 0
    available: int = 0
    captured: int = 0
    promised: int = 0
    delivered: int = 0
    fetched: int = 0
    lost: Mapping[Loss, int] = field(default_factory=dict)

    def check(self) -> None:
        """Raise AssertionError unless every token is accounted for."""
        chain = self.chain()
        assert all(more >= less for more, less in pairwise(chain)), chain
        assert all(count >= 0 for count in self.lost.values()), self.lost
        assert self.fetched >= 0, self
        assert self.prompt == self.spared + sum(self.lost.values()), self

    @property
    def spared(self) -> int:
        """Tokens that nobody computed."""
        return self.delivered + self.fetched

    def chain(self) -> tuple[int, ...]:
        return tuple(getattr(self, kind) for kind in KINDS)

    def rate(self, count: int) -> float:
        return count / self.prompt if self.prompt else 0.0


def account(
    *,
    prompt: int,
    oracle: int,
    available: int,
    captured: int,
    promised: int,
    delivered: int,
    fetched: int = 0,
    gone: Iterable[tuple[Loss, int]] = (),
    anybodys: int = 0,
) -> HitRate:
    """The numbers of one request as they were seen, in one chain that adds up.

    `anybodys` is what the oracle would be without walls between tenants.

    `gone` says in which way seen tokens ceased to be available, in the prompt's order, beginning
    with the first that is not; what it leaves open counts as evicted.
    """
    assert 0 <= delivered <= prompt, f"{delivered} tokens delivered of {prompt}"
    spared = delivered + fetched
    assert delivered <= spared <= prompt, f"{delivered} and {fetched} tokens spared of {prompt}"
    promised = min(prompt, max(promised, delivered))
    captured = min(prompt, max(captured, promised))
    available = min(prompt, max(available, captured, spared))
    oracle = min(prompt, max(oracle, available))
    lost: Counter[Loss] = Counter()
    open_tokens = oracle - available
    for loss, count in gone:
        lost[loss] += min(count, open_tokens)
        open_tokens -= min(count, open_tokens)
    lost[Loss.EVICTED] += open_tokens
    walled = max(0, min(prompt, anybodys) - oracle)
    lost[Loss.TENANT] += walled
    lost[Loss.NEW] += prompt - oracle - walled
    lost[Loss.LOAD] += available - max(captured, spared)
    lost[Loss.PAIR] += max(0, captured - max(promised, spared))
    lost[Loss.STALE] += max(0, promised - spared)
    numbers = (prompt, oracle, available, captured, promised, delivered, fetched)
    rate = HitRate(*numbers, dict(+lost))
    rate.check()
    return rate


def total(rates: Iterable[HitRate]) -> HitRate:
    known = list(rates)
    lost: Counter[Loss] = Counter()
    for rate in known:
        lost.update(rate.lost)
    sums = {kind: sum(getattr(each, kind) for each in known) for kind in KINDS}
    return HitRate(**sums, fetched=sum(each.fetched for each in known), lost=dict(+lost))
