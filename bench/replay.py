"""What routing by cost gains on a real trace, and whether it still does: exits 1 where it does not.

The Mooncake conversation trace over 8 replicas of 1.0M tokens, at 80 % of what they could compute
without any reuse, and at 110 %. Decode keeps no cache here and nothing is fetched from one cache
into another, so that eight caches are eight; a line more shows what fetching brings.
`make bench-replay ARGS=PATH/conversation_trace.jsonl` runs it.
"""

import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from kvferry.replay.command import run_all, silence
from kvferry.replay.options import Options
from kvferry.replay.outcome import Outcome
from kvferry.replay.report import losses, plot, table, write
from kvferry.replay.rivals import Policy
from kvferry.replay.trace import Trace, read_trace

TRACE = Path(__file__).parents[2] / "shared/traces/mooncake/conversation_trace.jsonl"
OUT = Path("bench/out/replay.json")
USUAL = (
    Policy.OURS,
    Policy.ROUND_ROBIN,
    Policy.LEAST_LOADED,
    Policy.RANDOM,
    Policy.SHARED_CACHE,
    Policy.INFINITE_CACHE,
)


def delivered(outcome: Outcome) -> float:
    rate = outcome.hit_rate
    return rate.rate(rate.delivered)


def bars(usual: dict[str, Outcome], crowded: dict[str, Outcome]) -> list[tuple[str, bool]]:
    """Each promise with its figures, and whether it is kept."""
    ours, least = usual["ours"], usual["least-loaded"]
    shared, endless = usual["shared-cache"], usual["infinite-cache"]
    hit, gain = delivered(ours), crowded["random"].ttft_ms() / crowded["ours"].ttft_ms()
    return [
        (f"hit rate {hit:.1%}, at least 24 %", hit >= 0.24),
        (f"imbalance {ours.imbalance:.3f}, at most 1.10", ours.imbalance <= 1.10),
        *(
            (
                f"p{share} {ours.ttft_ms(share / 100):.0f} ms, below least-loaded's"
                f" {least.ttft_ms(share / 100):.0f} ms",
                ours.ttft_ms(share / 100) < least.ttft_ms(share / 100),
            )
            for share in (50, 90)
        ),
        (f"at 110 % load the mean is {gain:.1f} times better than random's, at least 4", gain >= 4),
        (
            f"not above one shared cache, {delivered(shared):.1%},"
            f" or one without end, {delivered(endless):.1%}",
            hit <= delivered(shared) and hit <= delivered(endless),
        ),
    ]


def fetching(trace: Trace, load: float, console: Console) -> Outcome:
    """Ours, where blocks are fetched from who holds them."""
    options = Options(load=load, decode_cache=False, fetches=True)
    (outcome,) = run_all(trace, (Policy.OURS,), options, console)
    return replace(outcome, policy="ours, fetching")


def main() -> int:
    console = Console(width=150)
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else TRACE
    if not path.exists():
        console.print(f"{path} is not here: name the trace, as ARGS=PATH")
        return 2
    silence()
    trace = read_trace(path)
    options = Options(load=0.8, decode_cache=False, fetches=False)
    usual = run_all(trace, USUAL, options, console)
    usual.append(fetching(trace, 0.8, console))
    crowded = run_all(trace, (Policy.OURS, Policy.RANDOM), replace(options, load=1.1), console)
    crowded.append(fetching(trace, 1.1, console))
    for load, outcomes in ((0.8, usual), (1.1, crowded)):
        figures = [each.figures for each in outcomes]
        console.print(f"offered load {load:.0%}", table(outcomes), losses(figures), sep="\n")
        write(OUT.with_stem(f"replay-{load:.0%}".rstrip("%")), outcomes, {"trace": trace.name})
        plot(OUT.with_stem(f"replay-{load:.0%}".rstrip("%")).with_suffix(".png"), figures, console)
    found = bars({each.policy: each for each in usual}, {each.policy: each for each in crowded})
    for text, kept in found:
        console.print(f"{'kept' if kept else 'MISSED'}: {text}", highlight=False)
    return 0 if all(kept for _, kept in found) else 1


if __name__ == "__main__":
    sys.exit(main())
