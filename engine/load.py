"""How busy an engine is, and how fast, as the router's predictions want it."""

from dataclasses import dataclass

from engine.scheduler import Step

_WEIGHT = 0.2  # of the newest step; about the last ten steps count
_FULL_CHUNK = 64  # a step with fewer prompt tokens says less about the time of one


@dataclass(frozen=True, slots=True)
class Load:
    running: int  # choices with blocks, reserved ones included
    waiting: int  # choices without
    queued_tokens: int  # whose KV is still to be computed
    free_blocks: int  # to be had now, evicting cached ones
    total_blocks: int
    prefill_ms_per_token: float  # 0: not measured yet
    decode_step_ms: float  # 0: not measured yet
    # Of the steps that took `decode_step_ms` in the mean, the means of what was in them.
    step_sequences: float = 0.0
    step_context_tokens: float = 0.0
    context_tokens: int = 0  # of what runs now
    computed_prompts: int = 0  # ever


class Gauge:
    """Moving averages of what steps take. A mixed step's time beyond a decode step is prefill's."""

    def __init__(self) -> None:
        self.prefill_ms_per_token = 0.0
        self.decode_step_ms = 0.0
        self.step_sequences = 0.0
        self.step_context_tokens = 0.0

    def measure(self, step: Step, elapsed_ms: float) -> None:
        sizes = [part.stop - part.start for part in step.slices]
        prompt_tokens = sum(
            size
            for size, part in zip(sizes, step.slices, strict=True)
            if part.start < len(part.choice.request.prompt)
        )
        if prompt_tokens == 0:
            context = sum(part.stop for part in step.slices)
            self.step_sequences = _moved(self.step_sequences, len(step.slices), _WEIGHT)
            self.step_context_tokens = _moved(self.step_context_tokens, context, _WEIGHT)
            self.decode_step_ms = _moved(self.decode_step_ms, elapsed_ms, _WEIGHT)
            return
        if prompt_tokens < sum(sizes):
            elapsed_ms = max(0.0, elapsed_ms - self.decode_step_ms)
        weight = _WEIGHT * min(1.0, prompt_tokens / _FULL_CHUNK)
        self.prefill_ms_per_token = _moved(
            self.prefill_ms_per_token, elapsed_ms / prompt_tokens, weight
        )


def share(step: Step, started: float, ended: float) -> None:
    """Charge the time of a step to the prompts that were computed in it, by tokens.

    Times are the clock's, in seconds.
    """
    total = sum(part.stop - part.start for part in step.slices)
    for part in step.slices:
        request = part.choice.request
        tokens = min(part.stop, len(request.prompt)) - part.start
        if tokens > 0:
            if request.begun_at is None:
                request.begun_at = started
            request.compute_ms += (ended - started) * 1000 * tokens / total


def _moved(average: float, value: float, weight: float) -> float:
    return value if average == 0.0 else average + weight * (value - average)
