"""What a request's client has been told so far, and what to tell it next.

Tokens come from two legs, and from a second attempt after a failure, in any order between them.
Each choice passes every index on once, in order: an index that comes early waits, one that was
passed on before is compared and dropped. Sampling depends only on (seed, choice, index), so a
second attempt must repeat what the first one said; where it does not, the stream cannot go on.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from engine.sampling_params import SamplingParams
from model.stop_strings import StopStrings
from protos import inference_pb2 as pb
from protos import worker_pb2 as wpb


class Detokenizes(Protocol):
    """Turns token ids into whole characters (`model.detokenizer.Detokenizer`)."""

    def push(self, ids: list[int], /) -> str: ...

    def flush(self) -> str: ...


class Diverged(Exception):
    """A second attempt sampled another token where the client already has one."""


class Transcript:
    """The output of one request, all choices together. Lives as long as its stream."""

    def __init__(self, params: SamplingParams, detokenizer: Callable[[], Detokenizes]) -> None:
        self._choices = [_Choice(number, params, detokenizer()) for number in range(params.n)]

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self._choices)

    @property
    def ended_by_workers(self) -> bool:
        """Whether the workers know that every choice has ended: none was cut off here."""
        return all(choice.ended_by_worker for choice in self._choices)

    @property
    def tokens_per_choice(self) -> int:
        return max(choice.num_tokens for choice in self._choices)

    @property
    def num_tokens(self) -> int:
        """Tokens passed on, over all choices."""
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def only_first_tokens(self) -> bool:
        """Whether no choice has gone beyond its first token, so that an attempt may start over."""
        return all(choice.num_tokens <= 1 for choice in self._choices)

    @property
    def finish_reasons(self) -> list[str]:
        return [choice.finish_reason for choice in self._choices if choice.finished]

    def add(self, token: wpb.GeneratedToken) -> Iterator[pb.GenerateResponse]:
        """Take one token; yield what the client can now be told. Raises Diverged."""
        if token.choice >= len(self._choices):
            raise Diverged(f"a worker sent choice {token.choice} of {len(self._choices)}")
        yield from self._choices[token.choice].add(token)

    def start_over(self) -> None:
        """Forget tokens that wait for an earlier one: the attempt that sent them is gone."""
        for choice in self._choices:
            choice.waiting.clear()


def joined(told: Iterable[pb.GenerateResponse]) -> Iterator[pb.GenerateResponse]:
    """The same, with one delta for what has come of a choice at once."""
    before: pb.GenerateResponse | None = None
    for each in told:
        if (
            before is not None
            and before.HasField("delta")
            and each.HasField("delta")
            and before.delta.choice == each.delta.choice
        ):
            before.delta.token_ids.extend(each.delta.token_ids)
            before.delta.text += each.delta.text
            before.delta.logprobs.extend(each.delta.logprobs)
            continue
        if before is not None:
            yield before
        before = each
    if before is not None:
        yield before


class _Choice:
    def __init__(self, number: int, params: SamplingParams, detokenizer: Detokenizes) -> None:
        self._number = number
        self._detokenizer = detokenizer
        self._stops = StopStrings(params.stop)
        self._min_tokens = params.min_tokens
        self._token_ids: list[int] = []
        self.waiting: dict[int, wpb.GeneratedToken] = {}
        self.finish_reason = ""
        self.ended_by_worker = False

    @property
    def finished(self) -> bool:
        return bool(self.finish_reason)

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def add(self, token: wpb.GeneratedToken) -> Iterator[pb.GenerateResponse]:
        if token.index < self.num_tokens:
            self._compare(token)
            return
        self.waiting[token.index] = token
        while not self.finished and self.num_tokens in self.waiting:
            yield from self._pass_on(self.waiting.pop(self.num_tokens))

    def _compare(self, token: wpb.GeneratedToken) -> None:
        told = self._token_ids[token.index]
        if told != token.token_id:
            raise Diverged(
                f"choice {self._number}, token {token.index}: the client was told {told},"
                f" a worker now says {token.token_id}"
            )

    def _pass_on(self, token: wpb.GeneratedToken) -> Iterator[pb.GenerateResponse]:
        text, stop = self._text_of(token)
        self._token_ids.append(token.token_id)
        delta = pb.Delta(
            choice=self._number, index=token.index, token_ids=[token.token_id], text=text
        )
        if token.HasField("logprobs"):
            delta.logprobs.append(token.logprobs)
        yield pb.GenerateResponse(delta=delta)
        if not stop and not token.finish_reason:
            return
        self.ended_by_worker = bool(token.finish_reason)
        self.finish_reason = "stop" if stop else token.finish_reason
        finished = pb.Finished(choice=self._number, reason=self.finish_reason)
        finished.stop = stop or token.stop
        if token.HasField("stop_token_id") and not stop:
            finished.stop_token_id = token.stop_token_id
        yield pb.GenerateResponse(finished=finished)

    def _text_of(self, token: wpb.GeneratedToken) -> tuple[str, str]:
        """The text that is now safe to show, and the stop string that ended it, if one did.

        A token that ends the choice by being itself is no part of its text.
        """
        text = ""
        if not token.HasField("stop_token_id"):
            text = self._detokenizer.push([token.token_id])
        if token.finish_reason:
            text += self._detokenizer.flush()
        if token.index < self._min_tokens:
            return text, ""
        safe, stop = self._stops.push(text)
        if token.finish_reason and stop is None:
            safe += self._stops.flush()
        return safe, stop or ""
