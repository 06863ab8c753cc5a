"""How fast prompts come, how much work they bring and how long answers get, over the last minute
or so.
"""

import math

from engine.clock import Clock


class Pace:
    """Decaying sums: what happened `window_s` ago counts 1/e of what happens now.

    Until a window has passed, sums are divided by the time there was.
    """

    def __init__(self, clock: Clock, window_s: float = 60.0) -> None:
        self._clock = clock
        self._window_s = window_s
        self._started_at = clock.now()
        self._as_of = clock.now()
        self._prompts = 0.0
        self._work_ms = 0.0
        self._answers = 0.0
        self._output_tokens = 0.0

    def note(self, work_ms: float) -> None:
        """A prompt was routed that takes so long to compute."""
        self._decay()
        self._prompts += 1
        self._work_ms += work_ms

    def note_others(self, num_prompts: int) -> None:
        """Other routers have sent as many, as long as ours in the mean."""
        self._decay()
        if self._prompts:
            self._work_ms += num_prompts * self.prompt_ms
            self._prompts += num_prompts

    def note_output(self, num_tokens: int) -> None:
        """An answer has ended with so many tokens."""
        self._decay()
        self._answers += 1
        self._output_tokens += num_tokens

    @property
    def output_tokens(self) -> float:
        """Of an answer, in the mean; 0 where none was seen."""
        return self._output_tokens / self._answers if self._answers else 0.0

    @property
    def prompt_ms(self) -> float:
        """What a prompt takes to compute, in the mean; 0 where none came."""
        return self._work_ms / self._prompts if self._prompts else 0.0

    @property
    def prompts_per_ms(self) -> float:
        self._decay()
        return self._prompts / self._memory_ms()

    @property
    def busy(self) -> float:
        """Milliseconds of work in each millisecond: how many workers it keeps busy."""
        self._decay()
        return self._work_ms / self._memory_ms()

    def _memory_ms(self) -> float:
        """What the sums' weights add up to, so that a steady pace reads the same at any time."""
        age = (self._as_of - self._started_at) / self._window_s
        return max(1.0, 1000 * self._window_s * -math.expm1(-age))

    def _decay(self) -> None:
        now = self._clock.now()
        if now > self._as_of:
            left = math.exp((self._as_of - now) / self._window_s)
            self._prompts *= left
            self._work_ms *= left
            self._answers *= left
            self._output_tokens *= left
            self._as_of = now
