"""Deltas are whole characters, and add up to the text, for every split of every string."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.detokenizer import Detokenizer
from model.tokenizer import Tokenizer, byte_tokenizer
from tests.model.smollm2 import smollm2
from tests.model.text_strategies import smollm2_text, unhurried, unicode_text
from tests.model.tiny_vocabularies import piece_tokenizer

BYTES = byte_tokenizer()
PIECES = piece_tokenizer()


def deltas_of(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    stream = Detokenizer(tokenizer, **options)
    return [*(stream.push([token_id]) for token_id in ids), stream.flush()]


def test_three_characters_over_six_tokens_come_out_whole() -> None:
    deltas = deltas_of(smollm2(), [23274, 115, 40993, 179, 120, 248])
    assert deltas == ["", "日", "本", "", "", "語", ""]


def test_an_emoji_comes_out_with_its_last_token() -> None:
    ids = list("🚀".encode())
    assert deltas_of(BYTES, ids) == ["", "", "", "🚀", ""]


def test_a_text_that_ends_inside_a_character_ends_with_one_replacement() -> None:
    assert deltas_of(BYTES, list("a日".encode()[:-1])) == ["a", "", "", "\ufffd"]


def test_a_broken_character_is_replaced_once_it_cannot_be_completed() -> None:
    assert deltas_of(BYTES, [0xE6, 0x97, ord("x")]) == ["", "", "\ufffdx", ""]


def test_a_replacement_character_in_the_text_is_not_held_back() -> None:
    assert deltas_of(BYTES, list("\ufffd!".encode())) == ["", "", "\ufffd", "!", ""]


def test_encoded_surrogates_never_reach_the_text() -> None:
    text = "".join(deltas_of(BYTES, [0xED, 0xA0, 0x80, ord("a")]))
    assert text == "\ufffd\ufffd\ufffda"


def test_control_tokens_are_left_out_or_named() -> None:
    ids = [256, ord("a"), 259, ord("b"), 257]
    assert deltas_of(BYTES, ids) == ["", "a", "", "b", "", ""]
    named = deltas_of(BYTES, ids, skip_special=False)
    assert named == ["<|bos|>", "a", "<|im_end|>", "b", "<|eos|>", ""]


def test_a_control_token_inside_a_character_does_not_break_it() -> None:
    first, *rest = "é".encode()
    assert deltas_of(BYTES, [first, 259, *rest]) == ["", "", "é", ""]


def test_an_id_without_a_token_says_nothing() -> None:
    assert deltas_of(BYTES, [ord("a"), 300, 511, 1 << 31, ord("b")]) == ["a", "", "", "", "b", ""]


def test_the_space_a_piece_vocabulary_puts_first_is_dropped_once() -> None:
    ids = PIECES.encode("hello  hello")
    assert "".join(deltas_of(PIECES, ids)) == "hello  hello"
    assert "".join(deltas_of(PIECES, PIECES.encode("  hello"))) == "  hello"


def test_a_text_that_continues_a_prompt_keeps_its_first_space() -> None:
    ids = PIECES.encode("hello hello")
    assert "".join(deltas_of(PIECES, ids, continues=True)) == " hello hello"


def test_bytes_that_a_piece_vocabulary_falls_back_to_become_characters() -> None:
    ids = PIECES.encode("日本")
    assert deltas_of(PIECES, ids) == ["", "", "", "日", "", "", "本", ""]


def test_a_good_character_before_a_broken_one_stands() -> None:
    byte_of = {token_id: PIECES.token_bytes(token_id) for token_id in range(PIECES.vocab_size)}
    id_of = {data: token_id for token_id, data in byte_of.items() if len(data) == 1}
    ids = [id_of[bytes([byte])] for byte in b"\xe6\x97\xa5\xff"]
    assert deltas_of(PIECES, ids) == ["", "", "日", "\ufffd", ""]


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
@unhurried
@given(text=unicode_text)
def test_every_string_comes_back_without_a_replacement(tokenizer: Tokenizer, text: str) -> None:
    deltas = deltas_of(tokenizer, tokenizer.encode(text))
    assert "".join(deltas) == text == tokenizer.decode(tokenizer.encode(text))
    assert sum(delta.count("\ufffd") for delta in deltas) == text.count("\ufffd")


@unhurried
@given(text=smollm2_text)
def test_every_string_comes_back_from_smollm2(text: str) -> None:
    tokenizer = smollm2()
    assert "".join(deltas_of(tokenizer, tokenizer.encode(text))) == text


@unhurried
@given(ids=st.lists(st.integers(0, 49151), max_size=30), cuts=st.lists(st.integers(0, 30)))
def test_any_tokens_in_any_portions_add_up_to_the_decoded_text(
    ids: list[int], cuts: list[int]
) -> None:
    stream = Detokenizer(smollm2())
    ends = [0, *sorted(cuts), len(ids)]
    portions = [ids[start:stop] for start, stop in pairwise(ends)]
    text = "".join(map(stream.push, portions)) + stream.flush()
    assert text == smollm2().decode(ids)
    text.encode()  # valid UTF-8
