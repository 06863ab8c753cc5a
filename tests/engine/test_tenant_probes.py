"""A tenant cannot tell by the time it takes whether another one has sent a prompt."""

import random
import time
from collections.abc import Sequence
from math import erfc, sqrt

from kvcache.block_hash import TenantKey, tenant_key
from tests.engine.small_worker import CONFIG, SmallWorker

NUM_PROBES = 100
NUM_TOKENS = 513  # all probes of one round fit into the pool
ALICE, BOB = tenant_key("alice"), tenant_key("bob")


def first_token_s(worker: SmallWorker, prompt: Sequence[int], tenant: TenantKey) -> float:
    """Of this thread's own time: what others do on the machine would hide a difference."""
    request, heard = worker.request(prompt, 1, tenant=tenant)
    started = time.thread_time()
    worker.engine.add(request)
    while not heard.ended:
        worker.engine.step()
    return time.thread_time() - started


def p_value(one: Sequence[float], two: Sequence[float]) -> float:
    """Two-sided, of Mann and Whitney's rank test, by its normal approximation."""
    ordered = sorted([(value, 0) for value in one] + [(value, 1) for value in two])
    ranks = sum(rank for rank, (_, which) in enumerate(ordered, 1) if which == 0)
    n, m = len(one), len(two)
    mean, spread = n * (n + m + 1) / 2, sqrt(n * m * (n + m + 1) / 12)
    return erfc(abs(ranks - mean) / spread / sqrt(2))


def probes(worker: SmallWorker, tenant: TenantKey, rng: random.Random) -> float:
    """Half of the probes ask for what alice has sent, in random order among the others."""
    prompts = [
        [rng.randrange(CONFIG.vocab_size) for _ in range(NUM_TOKENS)] for _ in range(NUM_PROBES)
    ]
    for prompt in prompts[: NUM_PROBES // 2]:
        first_token_s(worker, prompt, ALICE)
    order = [(prompt, number < NUM_PROBES // 2) for number, prompt in enumerate(prompts)]
    rng.shuffle(order)
    times: dict[bool, list[float]] = {True: [], False: []}
    for prompt, sent in order:
        times[sent].append(first_token_s(worker, prompt, tenant))
    return p_value(times[True], times[False])


def test_probes_of_another_tenant_take_as_long_for_what_was_sent_as_for_what_was_not() -> None:
    """Without a difference, one run in a hundred looks as if there were one; three do not."""
    rng = random.Random(1)
    worker = SmallWorker(8192, max_tokens_per_step=1024)
    # Its own: else this test could not tell.
    assert any(probes(worker, ALICE, rng) < 0.01 for _ in range(3))
    assert any(probes(worker, BOB, rng) > 0.01 for _ in range(3))
