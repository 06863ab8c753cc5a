"""However two legs and several attempts say it, each choice is told once and in order."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling_params import SamplingParams
from protos import inference_pb2 as pb
from protos import worker_pb2 as wpb
from router.transcript import Diverged, Transcript
from tests.router.fakes import MODEL


def transcript(**params: object) -> Transcript:
    known = {"max_tokens": 100} | params
    return Transcript(SamplingParams(**known), lambda: MODEL.detokenizer(chat=False))  # type: ignore[arg-type]


def tokens(text: str, choice: int = 0, *, finish: str = "length") -> list[wpb.GeneratedToken]:
    data = text.encode()
    made = [
        wpb.GeneratedToken(choice=choice, index=index, token_id=byte)
        for index, byte in enumerate(data)
    ]
    made[-1].finish_reason = finish
    return made


def told(script: Transcript, said: Iterable[wpb.GeneratedToken]) -> list[pb.GenerateResponse]:
    return [response for token in said for response in script.add(token)]


def text(responses: Iterable[pb.GenerateResponse], choice: int = 0) -> str:
    return "".join(
        each.delta.text
        for each in responses
        if each.HasField("delta") and each.delta.choice == choice
    )


@given(
    texts=st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=3),
    repeats=st.integers(1, 3),
    randomness=st.randoms(use_true_random=False),
)
def test_any_order_of_any_repeats_tells_each_choice_once(
    texts: list[str], repeats: int, randomness: "object"
) -> None:
    script = transcript(n=len(texts))
    said = [token for choice, words in enumerate(texts) for token in tokens(words, choice)]
    said = said * repeats
    randomness.shuffle(said)  # type: ignore[attr-defined]
    responses = told(script, said)
    for choice, words in enumerate(texts):
        assert text(responses, choice) == words
        deltas = [
            each.delta
            for each in responses
            if each.HasField("delta") and each.delta.choice == choice
        ]
        assert [delta.index for delta in deltas] == list(range(len(words.encode())))
    assert script.finished
    assert sum(each.HasField("finished") for each in responses) == len(texts)


def test_an_attempt_that_starts_over_repeats_or_is_found_out() -> None:
    script = transcript()
    first, second, third = tokens("abc")
    assert text(told(script, [first, third])) == "a"
    script.start_over()
    assert told(script, [first]) == []
    assert text(told(script, [second])) == "b"  # the third token of the first attempt is forgotten
    with pytest.raises(Diverged, match=r"choice 0, token 1: the client was told 98.*now says 120"):
        told(script, [wpb.GeneratedToken(index=1, token_id=ord("x"))])


def test_a_choice_nobody_asked_for_is_refused() -> None:
    with pytest.raises(Diverged, match="sent choice 2 of 2"):
        told(transcript(n=2), [wpb.GeneratedToken(choice=2)])


def test_an_attempt_may_start_over_behind_first_tokens_only() -> None:
    script = transcript(n=2)
    told(script, [tokens("ab", 0)[0], tokens("ab", 1)[0]])
    assert script.only_first_tokens and script.num_tokens == 2
    told(script, [tokens("ab", 1)[1]])
    assert not script.only_first_tokens and script.tokens_per_choice == 2


@pytest.mark.parametrize(
    ("stops", "expected", "reason"),
    [
        (["own fox"], "The quick br", "stop"),
        (["own fix"], "The quick brown fox", "length"),  # held back to the end, then let go
        (["fox!"], "The quick brown fox", "length"),
    ],
)
def test_stop_strings_end_a_text_and_near_misses_do_not(
    stops: list[str], expected: str, reason: str
) -> None:
    script = transcript(stop=tuple(stops))
    responses = told(script, tokens("The quick brown fox"))
    assert text(responses) == expected
    assert responses[-1].finished.reason == reason
    assert script.ended_by_workers


def test_a_choice_cut_off_by_a_stop_string_takes_nothing_more() -> None:
    script = transcript(stop=("b",))
    responses = told(script, tokens("abc"))
    assert text(responses) == "a" and responses[-1].finished.stop == "b"
    assert script.num_tokens == 2 and not script.ended_by_workers


def test_an_unfinished_character_at_the_end_is_shown_as_one() -> None:
    script = transcript()
    said = [
        wpb.GeneratedToken(index=index, token_id=byte)
        for index, byte in enumerate("日".encode()[:2])
    ]
    said[-1].finish_reason = "length"
    assert text(told(script, said)) == "\ufffd"
