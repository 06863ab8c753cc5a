"""How many workers a workload needs, with a trace of our own, and whether arithmetic agrees.

Writes a trace of conversations to bench/out/conversations.jsonl and runs `kvferry capacity` on it,
as docs/replay.md shows. Then it asks for the goodput of one prefill worker whose prompts all take
equally long and come at random: what an M/D/1 queue can do is known by a formula (Erlang, 1909),
and the two have to agree within 5 %. Exits 1 where they do not.
"""

import json
import math
import os
import random
import sys
import time
from itertools import count
from pathlib import Path

from rich.console import Console

from kvferry.bench_report import Row, publish, row
from kvferry.replay.capacity import Capacity, Split
from kvferry.replay.capacity_command import capacity_command
from kvferry.replay.command import silence
from kvferry.replay.options import Options
from kvferry.replay.rivals import Policy
from kvferry.replay.speeds import Speeds
from kvferry.replay.targets import Targets
from kvferry.replay.trace import Arrival, Trace, read_trace

OUT = Path("bench/out/capacity.json")
TRACE = Path("bench/out/conversations.jsonl")
BLOCK_TOKENS = 512
SEEDS = (1, 2, 3)
MAY_DIFFER = 0.05
TTFT_S, PER_TOKEN_S = 2, 0.02
CACHE_TOKENS, MAX_WORKERS = 200_000, 4
COMMAND = (
    "capacity",
    str(TRACE),
    *("--ttft", f"{TTFT_S:g}", "--per-token", f"{PER_TOKEN_S:g}"),
    *("--max-workers", f"{MAX_WORKERS}", "--cache-tokens", f"{CACHE_TOKENS}"),
)


def conversations(num_requests: int, seed: int) -> list[dict[str, object]]:
    """Chats that begin with one of four instructions of 1,024 tokens, come at random and go on,
    after a while, with all that was said: in Mooncake's format, as they come.
    """
    rng, fresh = random.Random(seed), count(1)
    openings = [[next(fresh), next(fresh)] for _ in range(4)]
    lines: list[dict[str, object]] = []
    at_s = 0.0
    while len(lines) < num_requests:
        at_s += rng.expovariate(1.0)
        ids, turn_s = list(rng.choice(openings)), at_s
        for _ in range(rng.randint(1, 7)):
            ids = ids + [next(fresh) for _ in range(rng.randint(1, 5))]
            lines.append(
                {
                    "timestamp": round(1000 * turn_s),
                    "input_length": len(ids) * BLOCK_TOKENS + rng.randrange(BLOCK_TOKENS),
                    "output_length": rng.randint(200, 800),
                    "hash_ids": ids,
                }
            )
            turn_s += rng.uniform(20, 60)
    lines.sort(key=lambda line: line["timestamp"])  # type: ignore[arg-type,return-value]
    return lines[:num_requests]


def wait_within(rate: float, service_s: float, wait_s: float) -> float:
    """The share of an M/D/1 queue's customers that wait at most so long, for waits shorter than a
    service.
    """
    assert wait_s < service_s
    return max(0.0, 1 - rate * service_s) * math.exp(rate * wait_s)


def by_arithmetic(service_s: float, wait_s: float, share: float) -> float:
    """The highest rate at which that share waits at most so long."""
    low, high = 0.0, 1 / service_s
    for _ in range(60):
        middle = (low + high) / 2
        kept = wait_within(middle, service_s, wait_s) >= share
        low, high = (middle, high) if kept else (low, middle)
    return low


def queue_of(num_requests: int, seed: int) -> Capacity:
    """One prompt of 1,000 tokens takes 100 ms; 80 % shall wait for 50 ms at most."""
    rng, at_s = random.Random(seed), 0.0
    arrivals = []
    for _ in range(num_requests):
        arrivals.append(Arrival(at_s, 1000, 1, ()))
        at_s += rng.expovariate(1.0)
    speeds = Speeds(prefill_ms_per_token=0.1, link_bytes_per_ms=1e12)
    options = Options(policy=Policy.ROUND_ROBIN, load=None, speeds=speeds)
    return Capacity(Trace("M/D/1", BLOCK_TOKENS, tuple(arrivals)), options, Targets(150, 1e6, 0.8))


def agreement(num_requests: int) -> list[Row]:
    silence()
    exact = by_arithmetic(0.1, 0.05, 0.8)
    found = [queue_of(num_requests, seed).goodput(Split(1, 1)).rate for seed in SEEDS]
    what = "an M/D/1 queue of which 80 % wait 50 ms at most"
    return [row(what, found, peer="Erlang's formula", peer_values=[exact], unit="requests/s")]


def main() -> int:
    began, load, console = time.monotonic(), os.getloadavg()[0], Console(width=120)
    num_requests = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    TRACE.parent.mkdir(parents=True, exist_ok=True)
    TRACE.write_text("\n".join(map(json.dumps, conversations(num_requests, seed=1))) + "\n")
    console.print(f"$ kvferry {' '.join(COMMAND)}", highlight=False)
    asked = Capacity(
        read_trace(TRACE),
        Options(load=None, cache_tokens=CACHE_TOKENS),
        Targets(1000 * TTFT_S, 1000 * PER_TOKEN_S),
    )
    capacity_command(asked, None, MAX_WORKERS, OUT, OUT.with_suffix(".png"), console)
    console.print(f"{time.monotonic() - began:.0f} s", highlight=False)
    rows = agreement(2 * num_requests)
    publish(OUT.with_stem("capacity-queue"), rows, console, load)
    (found,) = rows
    assert found.ratio is not None
    apart = abs(found.ratio - 1)
    kept = apart <= MAY_DIFFER
    said = f"{apart:.1%} from arithmetic, at most {MAY_DIFFER:.0%}"
    console.print(f"{'kept' if kept else 'MISSED'}: {said}", highlight=False)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
