"""When a choice is over: a stop token, a stop string, or its length.

Prefill applies the rules to the first token and decode to all of them, with the same result.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.sampling_params import SamplingParams
from model.detokenizer import Detokenizer
from model.stop_strings import StopStrings
from model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Finish:
    reason: str  # "stop" or "length"
    stop: str = ""
    stop_token_id: int | None = None


def ending_token_ids(params: SamplingParams, eos_token_ids: Sequence[int]) -> frozenset[int]:
    """The tokens that end a choice when sampled."""
    eos = () if params.ignore_eos else eos_token_ids
    return frozenset((*params.stop_token_ids, *eos))


class StopRules:
    """Judges the tokens of one choice, in order. A tokenizer is needed for stop strings only."""

    def __init__(
        self, params: SamplingParams, eos_token_ids: Sequence[int], tokenizer: Tokenizer | None
    ) -> None:
        self._params = params
        self._ending = ending_token_ids(params, eos_token_ids)
        self._text: Detokenizer | None = None
        self._stops: StopStrings | None = None
        if params.stop:
            assert tokenizer is not None, "stop strings without a tokenizer"
            self._text = Detokenizer(tokenizer, continues=True)
            self._stops = StopStrings(params.stop)

    def judge(self, token_id: int, index: int) -> Finish | None:
        """The end that output token number `index` brings, if any."""
        if token_id in self._ending:
            return Finish("stop", stop_token_id=token_id)
        matched = self._match(token_id, index)
        if matched is not None:
            return Finish("stop", stop=matched)
        if index + 1 >= self._params.max_tokens:
            return Finish("length")
        return None

    def _match(self, token_id: int, index: int) -> str | None:
        if self._text is None or self._stops is None:
            return None
        delta = self._text.push([token_id])
        if index < self._params.min_tokens:
            return None  # the text of the first min_tokens tokens is not searched
        return self._stops.push(delta)[1]
