"""What a run against a live cluster found, from its replies."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.replay.figures import Figures, spread_of
from kvferry.replay.targets import Targets
from kvferry.serve_bench.load import OK, Reply
from router.hit_rate import KINDS, HitRate


@dataclass(frozen=True, slots=True)
class Results:
    """`split` is the router's own account of the same prompts, where it could be asked."""

    replies: Sequence[Reply]
    num_planned: int
    duration_s: float
    split: HitRate | None
    targets: Targets | None = None

    @property
    def in_time(self) -> float | None:
        """The share of the requests sent that kept the targets, if there are any."""
        if self.targets is None:
            return None
        return self.targets.attained(self.served, len(self.replies))

    @property
    def served(self) -> list[Reply]:
        return [reply for reply in self.replies if reply.code == OK]

    @property
    def failed(self) -> Counter[str]:
        return Counter(reply.code for reply in self.replies if reply.code != OK)

    @property
    def prompt_tokens(self) -> int:
        return sum(reply.prompt_tokens for reply in self.served)

    @property
    def cached_tokens(self) -> int:
        return sum(reply.usage.cached_tokens for reply in self.served if reply.usage)

    @property
    def hit_rate(self) -> HitRate:
        """The router's account where it is about these prompts alone, else what was delivered."""
        told = (self.prompt_tokens, self.cached_tokens)
        if self.split is not None and (self.split.prompt, self.split.spared) == told:
            return self.split
        cached = self.cached_tokens
        fetched = min(cached, sum(each.fetched_tokens for each in self.journeys()))
        held = cached - fetched
        return HitRate(self.prompt_tokens, cached, cached, held, held, held, fetched)

    @property
    def split_is_known(self) -> bool:
        return self.hit_rate is self.split

    def computed_tokens(self) -> dict[str, int]:
        """Prompt tokens, by who computed them; empty where the door does not tell."""
        computed: Counter[str] = Counter()
        for journey in self.journeys():
            computed[journey.prefill or journey.decode] += journey.computed_tokens
        return dict(sorted(computed.items()))

    def requests(self) -> dict[str, int]:
        """By who computed the prompt."""
        computed = Counter(each.prefill or each.decode for each in self.journeys())
        return dict(sorted(computed.items()))

    def figures(self, name: str) -> Figures:
        return Figures(
            name=name,
            hit_rate=self.hit_rate,
            ttft_ms=[reply.ttft_ms for reply in self.served],
            tpot_ms=[reply.tpot_ms for reply in self.served if reply.num_tokens > 1],
            work=self.computed_tokens(),
            work_unit="prompt tokens computed",
            failed=self.failed,
        )

    def journeys(self) -> list[Any]:
        known = (reply.usage.journey for reply in self.served if reply.usage)
        return [journey for journey in known if journey is not None]

    def tenants(self) -> dict[str, "Results"]:
        names = sorted({reply.tenant for reply in self.replies})
        mine = {name: [each for each in self.replies if each.tenant == name] for name in names}
        return {
            name: Results(replies, len(replies), self.duration_s, None, self.targets)
            for name, replies in mine.items()
        }

    def summary(self) -> dict[str, Any]:
        rate, served = self.hit_rate, self.served
        lost = {loss.value: count for loss, count in rate.lost.items()}
        return {
            "planned": self.num_planned,
            "sent": len(self.replies),
            "served": len(served),
            "failed": dict(self.failed),
            "duration_s": self.duration_s,
            "requests_per_s": len(served) / self.duration_s if self.duration_s else 0.0,
            "tokens_per_s": self._per_s(sum(reply.num_tokens for reply in served)),
            "late_ms": spread_of([reply.late_ms for reply in self.replies]),
            "ttft_ms": spread_of([reply.ttft_ms for reply in served]),
            "tpot_ms": spread_of([reply.tpot_ms for reply in served if reply.num_tokens > 1]),
            "worst_pause_ms": spread_of([reply.worst_pause_ms for reply in served]),
            "in_time": self.in_time,
            "hit_rate": rate.rate(rate.delivered),
            "fetched": rate.rate(rate.fetched),
            "tokens": dict(zip(KINDS, rate.chain(), strict=True)) if self.split_is_known else None,
            "lost": lost if self.split_is_known else None,
            "computed_tokens": self.computed_tokens(),
            "requests": self.requests(),
            "shipped_bytes": sum(journey.shipped_bytes for journey in self.journeys()),
            "retried": sum(journey.attempts > 1 for journey in self.journeys()),
        }

    def rows(self) -> list[dict[str, Any]]:
        return [_row(reply) for reply in sorted(self.replies, key=lambda each: each.number)]

    def _per_s(self, count: int) -> float:
        return count / self.duration_s if self.duration_s else 0.0


def _row(reply: Reply) -> dict[str, Any]:
    usage = reply.usage
    journey = usage.journey if usage else None
    return {
        "request": reply.number,
        "tenant": reply.tenant,
        "due_s": round(reply.at_s, 4),
        "code": reply.code,
        "message": reply.message,
        "late_ms": round(reply.late_ms, 2),
        "ttft_ms": round(reply.ttft_ms, 2),
        "tpot_ms": round(reply.tpot_ms, 3),
        "prompt_tokens": reply.prompt_tokens,
        "cached_tokens": usage.cached_tokens if usage else None,
        "fetched_tokens": journey.fetched_tokens if journey else None,
        "output_tokens": reply.num_tokens,
        "prefill": journey.prefill if journey else None,
        "decode": journey.decode if journey else None,
    }
