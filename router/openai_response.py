"""Answers in OpenAI's shape, whole or in chunks, from the events of the one handler."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from model.tokenizer import Tokenizer
from protos import inference_pb2 as pb
from router.openai_request import Asked

LOWEST_LOGPROB = -9999.0  # JSON has no infinity

Json = dict[str, Any]


@dataclass(slots=True)
class _ChoiceState:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    offset: int = 0  # of the next token's text in the choice's
    finish: pb.Finished | None = None


class Answer:
    """Collects the events of one HTTP request; gives chunks as they come, or all of it at the end.

    `prompts` are the texts to echo, one for each of the request's prompts, or empty.
    """

    def __init__(
        self,
        asked: Asked,
        answer_id: str,
        created: int,
        tokenizer: Tokenizer,
        eos_token_ids: Sequence[int],
        prompts: Sequence[str] = (),
    ) -> None:
        self._asked = asked
        self._id = answer_id
        self._created = created
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._model = ""
        self._per_prompt = asked.num_choices
        total = self._per_prompt * len(asked.requests)
        self._choices = [_ChoiceState() for _ in range(total)]
        self._prompts = prompts
        for number, choice in enumerate(self._choices):
            choice.text = self._echo(number)
            choice.offset = len(choice.text)
        self._usages: list[pb.Usage] = []

    def add(self, prompt: int, event: pb.GenerateResponse) -> Iterator[Json]:
        """Take one event of the prompt with this number; yield the chunks it makes."""
        match event.WhichOneof("event"):
            case "started":
                self._model = event.started.model
            case "delta":
                yield from self._delta(prompt * self._per_prompt + event.delta.choice, event.delta)
            case "finished":
                number = prompt * self._per_prompt + event.finished.choice
                self._choices[number].finish = event.finished
                yield self._chunk([self._part(number, "", None, event.finished)])
            case "usage":
                self._usages.append(event.usage)

    def opening(self) -> Iterator[Json]:
        """The chunks before the first token: the role in a chat, the prompt where it is echoed."""
        for number in range(len(self._choices)):
            if self._asked.chat:
                delta = {"role": "assistant", "content": ""}
                part = {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}
                yield self._chunk([part])
            elif self._echo(number):
                yield self._chunk([self._part(number, self._echo(number), None, None)])

    def closing(self) -> Iterator[Json]:
        if self._asked.include_usage:
            yield self._chunk([]) | {"usage": self.usage()}

    def whole(self) -> Json:
        """The answer to a request that did not ask for a stream."""
        return self._envelope("chat.completion" if self._asked.chat else "text_completion") | {
            "choices": [self._whole_choice(number) for number in range(len(self._choices))],
            "usage": self.usage(),
        }

    def usage(self) -> Json:
        prompt = sum(usage.prompt_tokens for usage in self._usages)
        completion = sum(usage.completion_tokens for usage in self._usages)
        cached = sum(usage.cached_tokens for usage in self._usages)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _echo(self, number: int) -> str:
        return self._prompts[number // self._per_prompt] if self._prompts else ""

    def _delta(self, number: int, delta: pb.Delta) -> Iterator[Json]:
        choice = self._choices[number]
        choice.text += delta.text
        choice.token_ids += delta.token_ids
        choice.logprobs += delta.logprobs
        logprobs = self._logprobs(choice, delta.logprobs) if self._asked.stream else None
        if delta.text or logprobs is not None or self._asked.return_token_ids:
            part = self._part(number, delta.text, logprobs, None)
            if self._asked.return_token_ids:
                part["token_ids"] = list(delta.token_ids)
            yield self._chunk([part])

    def _part(
        self, number: int, text: str, logprobs: Json | None, finish: pb.Finished | None
    ) -> Json:
        """One choice's share of a chunk."""
        part: Json = {"index": number, "logprobs": logprobs}
        if self._asked.chat:
            part["delta"] = {"content": text} if text else {}
        else:
            part["text"] = text
        part["finish_reason"] = finish.reason if finish else None
        if finish:
            part["stop_reason"] = self._stop_reason(finish)
        return part

    def _whole_choice(self, number: int) -> Json:
        choice = self._choices[number]
        finish = choice.finish or pb.Finished()
        said: Json = {"index": number}
        if self._asked.chat:
            said["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
        else:
            said["text"] = choice.text
        said["logprobs"] = self._logprobs(choice, choice.logprobs)
        said["finish_reason"] = finish.reason
        said["stop_reason"] = self._stop_reason(finish)
        if self._asked.return_token_ids:
            said["token_ids"] = choice.token_ids
        return said

    def _stop_reason(self, finish: pb.Finished) -> str | int | None:
        """What matched, where it was the client's own: a stop string or a stop token."""
        if finish.stop:
            return finish.stop
        if finish.HasField("stop_token_id") and finish.stop_token_id not in self._eos_token_ids:
            return finish.stop_token_id
        return None

    def _chunk(self, parts: list[Json]) -> Json:
        kind = "chat.completion.chunk" if self._asked.chat else "text_completion"
        chunk = self._envelope(kind) | {"choices": parts}
        return chunk | {"usage": None} if self._asked.include_usage else chunk

    def _envelope(self, kind: str) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _logprobs(self, choice: _ChoiceState, tokens: Sequence[pb.TokenLogprobs]) -> Json | None:
        if not self._asked.logprobs:
            return None
        if self._asked.chat:
            return {"content": [self._chat_logprob(token) for token in tokens]}
        return self._completion_logprobs(choice, tokens)

    def _chat_logprob(self, token: pb.TokenLogprobs) -> Json:
        return self._named(token) | {"top_logprobs": [self._named(each) for each in token.top]}

    def _named(self, token: pb.TokenLogprobs | pb.TopLogprob) -> Json:
        data = self._tokenizer.token_bytes(token.token_id)
        return {
            "token": self._token(token.token_id),
            "logprob": _finite(token.logprob),
            "bytes": list(data),
        }

    def _completion_logprobs(
        self, choice: _ChoiceState, tokens: Sequence[pb.TokenLogprobs]
    ) -> Json:
        names = [self._token(token.token_id) for token in tokens]
        offsets: list[int] = []
        for name in names:
            offsets.append(choice.offset)
            choice.offset += len(name)
        return {
            "tokens": names,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [
                {self._token(each.token_id): _finite(each.logprob) for each in token.top}
                for token in tokens
            ],
            "text_offset": offsets,
        }

    def _token(self, token_id: int) -> str:
        """A token as text: part of a character shows as U+FFFD, its bytes say what it is."""
        if self._tokenizer.is_control(token_id):
            return self._tokenizer.token(token_id) or ""
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB
