"""Vocabularies of every kind that a GGUF file may hold, and files that hold none we can use."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from model.errors import BadModelFile
from model.gguf_file import read_gguf
from model.tokenizer import Tokenizer, from_gguf
from tests.model.text_strategies import unhurried, unicode_text
from tests.model.tiny_vocabularies import (
    byte_level_metadata,
    byte_level_tokenizer,
    piece_metadata,
    piece_tokenizer,
)

# Merges that show where a rule lets words begin and end.
REVEALING = ["1 2", "12 3", "Ġ 1", "Ġ Ġ", "Ċ Ċ", "' l", "'l l", "' L", "'L L", "! Ċ", "a B", "/ Ċ"]
TEXT = "I'll I'LL 1234  1\n\n1 aB !\n/\n"


def spelled(tokenizer: Tokenizer, text: str) -> list[str]:
    return [str(tokenizer.token(token_id)) for token_id in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (
            ("gpt-2", "default"),
            "I 'll Ġ I ' L L Ġ 123 4 Ġ Ġ1 Ċ Ċ 1 Ġ aB Ġ ! Ċ / Ċ",
        ),
        (
            ("smollm", "starcoder"),
            "I 'll Ġ I ' L L Ġ 1 2 3 4 ĠĠ 1 ĊĊ 1 Ġ aB Ġ ! Ċ / Ċ",
        ),
        (
            ("llama-bpe", "llama3", "smaug-bpe"),
            "I 'll Ġ I 'LL Ġ 123 4 Ġ Ġ 1 ĊĊ 1 Ġ aB Ġ !Ċ /Ċ",
        ),
        (
            ("qwen2", "deepseek-r1-qwen"),
            "I 'll Ġ I 'LL Ġ 1 2 3 4 Ġ Ġ 1 ĊĊ 1 Ġ aB Ġ !Ċ /Ċ",
        ),
        (
            ("tekken",),
            "I 'll Ġ I 'LL Ġ 1 2 3 4 Ġ Ġ 1 ĊĊ 1 Ġ a B Ġ !Ċ /Ċ",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_each_kind_cuts_words_by_its_own_rule(kinds: tuple[str, ...], expected: str) -> None:
    for kind in kinds:
        assert " ".join(spelled(byte_level_tokenizer(kind, REVEALING), TEXT)) == expected


def test_qwen2_composes_characters_before_it_reads_them() -> None:
    assert byte_level_tokenizer("qwen2", []).encode("e\u0301") == byte_level_tokenizer(
        "qwen2", []
    ).encode("é")
    assert (
        byte_level_tokenizer("llama-bpe", []).decode(
            byte_level_tokenizer("llama-bpe", []).encode("e\u0301")
        )
        == "e\u0301"
    )


def test_llama3_takes_a_word_that_is_a_token_whole() -> None:
    merges = ["b c", "a b", "ab c"]
    assert spelled(byte_level_tokenizer("llama-bpe", merges), "abc") == ["abc"]
    assert spelled(byte_level_tokenizer("qwen2", merges), "abc") == ["a", "bc"]


def test_a_control_token_that_is_a_word_is_not_made_of_text() -> None:
    metadata = byte_level_metadata("llama-bpe", ["a b"])
    names = metadata["tokenizer.ggml.tokens"]
    assert isinstance(names, list)
    names[-1] = "stop"
    tokenizer = from_gguf(metadata)
    assert spelled(tokenizer, "stop") == ["s", "t", "o", "p"]
    assert tokenizer.encode_special("stop") == [tokenizer.token_id("stop")]


def test_pieces_are_merged_by_score() -> None:
    pieces = piece_tokenizer()
    assert spelled(pieces, "hello world") == ["▁hello", "▁world"]
    assert spelled(pieces, "hell") == ["▁hel", "l"]
    assert spelled(pieces, "  hello") == ["▁▁", "▁hello"]


def test_what_no_piece_covers_falls_back_to_bytes() -> None:
    assert spelled(piece_tokenizer(), "é日\n") == [
        "▁",
        "é",
        "<0xE6>",
        "<0x97>",
        "<0xA5>",
        "<0x0A>",
    ]


def test_text_that_looks_like_a_byte_piece_stays_text() -> None:
    pieces = piece_tokenizer()
    assert pieces.decode(pieces.encode("<0x0A>")) == "<0x0A>"
    assert "<0x0A>" not in spelled(pieces, "<0x0A>")


def test_tokens_the_makers_added_are_matched_whole_in_any_text() -> None:
    assert spelled(piece_tokenizer(), "a<think>    ") == ["▁", "a", "<think>", "    "]
    assert piece_tokenizer().decode(piece_tokenizer().encode("a<think>    ")) == "a<think>    "
    assert not piece_tokenizer().is_control(piece_tokenizer().encode("<think>")[0])


def test_control_tokens_are_never_made_by_merging_pieces() -> None:
    assert not any(map(piece_tokenizer().is_control, piece_tokenizer().encode("<s></s><unk>")))


def test_the_space_before_a_text_can_be_off() -> None:
    assert spelled(piece_tokenizer(add_space_prefix=False), "hello") == ["h", "el", "lo"]


def test_end_of_turn_tokens_also_end_a_text() -> None:
    metadata = byte_level_metadata("llama-bpe", [])
    names = metadata["tokenizer.ggml.tokens"]
    assert isinstance(names, list)
    size = len(names)
    assert from_gguf(metadata).eos_token_ids == (size - 2,)
    metadata["tokenizer.ggml.eot_token_id"] = 65
    assert from_gguf(metadata).eos_token_ids == (size - 2, 65)
    names[-1] = "<|eot_id|>"
    assert from_gguf(metadata).eos_token_ids == (size - 2, 65, size - 1)


def test_the_end_of_a_text_is_a_control_token_even_if_the_file_forgot_to_say_so() -> None:
    tokenizer = byte_level_tokenizer("gpt-2", [], token_type=None)
    assert tokenizer.special_tokens.names == ("<|end|>", "<|im_start|>")
    assert not any(map(tokenizer.is_control, tokenizer.encode("<|end|>")))


def test_an_ordinary_token_with_a_role_stays_ordinary() -> None:
    tokenizer = byte_level_tokenizer(
        "gpt-2", ["a b"], padding_token_id=0, unknown_token_id=1, eos_token_id=256, bos_token_id=2
    )
    assert spelled(tokenizer, '!"#ab') == ["!", '"', "#", "ab"]
    assert tokenizer.decode(tokenizer.encode('!"#ab')) == '!"#ab'
    assert tokenizer.eos_token_ids == (256, 257)


def test_a_control_token_of_one_character_does_not_take_it_from_the_text() -> None:
    metadata = byte_level_metadata("gpt-2", [])
    types = metadata["tokenizer.ggml.token_type"]
    assert isinstance(types, list)
    types[0] = 3
    assert from_gguf(metadata).decode(from_gguf(metadata).encode("Hi!")) == "Hi!"


def test_a_control_token_that_merges_would_make_is_still_not_made_of_text() -> None:
    metadata = byte_level_metadata("gpt-2", ["s t", "o p", "st op", "stop s"])
    names, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(names, list) and isinstance(types, list)
    types[names.index("stop")] = 3
    assert spelled(from_gguf(metadata), "stops") == ["st", "op", "s"]


def naive_pieces(text: str) -> list[str]:
    """SentencePiece's BPE as its paper has it: join the best-scored pair until none is left."""
    metadata = piece_metadata()
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    assert isinstance(tokens, list) and isinstance(scores, list)
    score = dict(zip(tokens[:-2], scores[:-2], strict=True))  # the last two are no pieces
    pieces = list(("▁" + text if text else text).replace(" ", "▁"))
    while True:
        joined = [left + right for left, right in pairwise(pieces)]
        pairs = [(-score[piece], i) for i, piece in enumerate(joined) if piece in score]
        if not pairs:
            return pieces
        _, i = min(pairs)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


@unhurried
@given(st.text("helowrd ", max_size=30).filter(lambda text: "    " not in text))
def test_pieces_are_those_of_the_plain_algorithm(text: str) -> None:
    assert spelled(piece_tokenizer(), text) == naive_pieces(text)


@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "llama-bpe", "deepseek-r1-qwen", "tekken"])
@unhurried
@given(text=unicode_text)
def test_every_string_comes_back_from_every_kind(kind: str, text: str) -> None:
    tokenizer = byte_level_tokenizer(kind, REVEALING)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("metadata", [piece_metadata(), byte_level_metadata("smollm", REVEALING)])
def test_a_file_gives_the_same_tokenizer_by_either_reader(
    tmp_path: Path, metadata: dict[str, object]
) -> None:
    path = tmp_path / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    put: dict[type, Callable[[str, Any], None]] = {
        str: writer.add_string,
        bool: writer.add_bool,
        int: writer.add_uint32,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        put[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = from_gguf(GGUFReader(path))
    assert tokenizer.fingerprint == from_gguf(read_gguf(path).fields).fingerprint
    assert tokenizer.fingerprint == from_gguf(metadata).fingerprint
    assert tokenizer.encode(TEXT) == from_gguf(metadata).encode(TEXT)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'; known kinds are gpt2 and llama"),
        ({"pre": "klingon"}, "tokenizer.ggml.pre is 'klingon'; known kinds are codeshell, dbrx"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing or empty"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is not a list of texts"),
        ({"token_type": [1, 2]}, "tokenizer.ggml.token_type is not a list of 259 numbers"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges has 'ab', not a pair of tokens"),
        ({"merges": ["x y"]}, "tokenizer.ggml.merges makes 'xy', which is no token"),
        ({"eos_token_id": 999}, "tokenizer.ggml.eos_token_id is 999, outside the 259 tokens"),
        ({"bos_token_id": -1}, "tokenizer.ggml.bos_token_id is -1, not a whole number"),
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token is 1, not true or false"),
    ],
)
def test_a_broken_vocabulary_is_refused_by_key(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(BadModelFile) as refused:
        byte_level_tokenizer("gpt-2", ["a b"], **changes)
    assert str(refused.value).startswith(f"tiny.gguf: {problem}")


def test_pieces_without_scores_are_refused() -> None:
    with pytest.raises(BadModelFile, match=r"tokenizer\.ggml\.scores is missing"):
        piece_tokenizer(scores=None)
    with pytest.raises(BadModelFile, match=r"tokenizer\.ggml\.scores is not a list of"):
        piece_tokenizer(scores=[0.0])


def test_a_token_listed_twice_keeps_its_first_id() -> None:
    metadata = byte_level_metadata("gpt-2", ["a b"])
    names = metadata["tokenizer.ggml.tokens"]
    assert isinstance(names, list)
    names[-3] = "a"
    metadata["tokenizer.ggml.merges"] = []
    tokenizer = from_gguf(metadata)
    assert tokenizer.encode("a") == [names.index("a")]
    assert tokenizer.vocab_size == len(names)
