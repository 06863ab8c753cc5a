"""How fast the workers of a live cluster are, in the terms of a replay.

A prompt's line is fitted to what the client saw, less the quarter that waited longest; where there
were too few prompts for that, and for a decode step, it is what the workers say of themselves.
"""

from collections.abc import Sequence
from statistics import fmean, median

import numpy as np

from kvferry.errors import CommandError
from kvferry.replay.speeds import Speeds
from kvferry.serve_bench.results import Results
from prefix_index.index import Role, WorkerRecord
from router.snapshot import BYTES_PER_VALUE, PLANES

LEAST_PROMPTS = 20
UNDISTURBED = 0.75


def measured_speeds(records: Sequence[WorkerRecord], results: Results) -> Speeds:
    """What was not measured keeps its default. Raises CommandError where there is no worker."""
    if not records:
        raise CommandError("the index knows no worker")
    prefill = [each.load for each in records if each.role is Role.PREFILL]
    decode = [each.load for each in records if each.role is Role.DECODE]
    manifest = records[0].manifest
    token_bytes = manifest.num_layers * manifest.num_kv_heads * manifest.head_dim * PLANES
    links = [
        journey.shipped_bytes / journey.transfer_ms
        for journey in results.journeys()
        if journey.transfer_ms > 0 and journey.shipped_bytes > 0
    ]
    line = prompt_line(results)
    base_ms, token_ms = line or (0.0, _mean([load.prefill_ms_per_token for load in prefill]))
    return Speeds().changed(
        prefill_base_ms=base_ms,
        prefill_ms_per_token=token_ms,
        step_base_ms=_mean([load.decode_step_ms for load in decode]),
        step_ms_per_sequence=0.0,
        step_ms_per_token=0.0,
        token_bytes=token_bytes * BYTES_PER_VALUE.get(manifest.dtype, 4),
        link_bytes_per_ms=median(links) if links else None,
    )


def prompt_line(results: Results) -> tuple[float, float] | None:
    """Milliseconds to the first token for any prompt, and for each token of it that is computed."""
    seen = np.array(
        [
            (reply.usage.journey.computed_tokens, reply.ttft_ms - reply.late_ms)
            for reply in results.served
            if reply.usage and reply.usage.journey and reply.usage.journey.prefill
        ]
    )
    if len(seen) < LEAST_PROMPTS or len(set(seen[:, 0])) < 2:
        return None
    for _ in range(2):
        token_ms, base_ms = np.polyfit(seen[:, 0], seen[:, 1], 1)
        waited = seen[:, 1] - token_ms * seen[:, 0] - base_ms
        seen = seen[waited <= np.quantile(waited, UNDISTURBED)]
    return (float(base_ms), float(token_ms)) if token_ms > 0 and base_ms >= 0 else None


def _mean(measured: Sequence[float]) -> float | None:
    known = [value for value in measured if value > 0]
    return fmean(known) if known else None
