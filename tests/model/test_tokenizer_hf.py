"""A Hugging Face folder gives transformers' ids, and its own files say what its tokens are for."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from model.errors import BadModelFile
from model.gguf_vocabulary import read_gguf_vocabulary
from model.tokenizer import Tokenizer, from_hf
from tests.model.tiny_vocabularies import byte_level_metadata, byte_level_tokenizer

MERGES = ["a b", "Ġ a", "Ċ Ċ"]


def tokenizer_json(**changes: object) -> dict[str, Any]:
    """A byte-level vocabulary with two control tokens and one that is only added."""
    source = read_gguf_vocabulary(byte_level_metadata("smollm", MERGES), "tiny.gguf")
    written: dict[str, Any] = copy.deepcopy(source.document)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    written["added_tokens"].append({"id": 261, "content": "<think>", **flags})
    return written | changes


def save(folder: Path, written: object, **files: object) -> Path:
    for name, value in {"tokenizer": written, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


def load(folder: Path, written: object, **files: object) -> Tokenizer:
    return from_hf(save(folder, written, **files))


def post_processor(token: str, token_id: int) -> dict[str, Any]:
    return {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": token, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


NAMES = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|end|>"}}


def test_a_folder_gives_the_ids_of_the_gguf_file_with_the_same_vocabulary(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, tokenizer_json())
    text = "ab  12\n\n1 a <|end|> é"
    assert tokenizer.encode(text) == byte_level_tokenizer("smollm", MERGES).encode(text)
    assert tokenizer.vocab_size == 262


def test_special_tokens_are_named_by_the_config(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, tokenizer_json(), tokenizer_config=NAMES)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (260, (259,))
    assert tokenizer.special_tokens.bos == "<|im_start|>"
    assert tokenizer.special_tokens.eos == "<|end|>"


def test_special_tokens_may_stand_in_a_map_of_their_own(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, tokenizer_json(), special_tokens_map=NAMES)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (260, (259,))


def test_more_tokens_may_end_a_text(tmp_path: Path) -> None:
    generation = {"eos_token_id": [65, 259]}
    tokenizer = load(
        tmp_path, tokenizer_json(), tokenizer_config=NAMES, generation_config=generation
    )
    assert tokenizer.eos_token_ids == (259, 65)


def test_a_token_that_ends_a_text_is_a_control_token_though_it_is_only_added(
    tmp_path: Path,
) -> None:
    named = {"eos_token": "<think>"}
    tokenizer = load(tmp_path, tokenizer_json(), tokenizer_config=named)
    assert tokenizer.is_control(261)
    assert 261 not in tokenizer.encode("a<think>")
    assert tokenizer.encode_special("a<think>")[-1] == 261


def test_a_token_that_is_only_added_is_matched_in_any_text(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, tokenizer_json(), tokenizer_config=NAMES)
    assert tokenizer.encode("<think>") == [261]
    assert tokenizer.decode([261]) == "<think>"


def test_an_ordinary_token_used_as_padding_stays_ordinary(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, tokenizer_json(), tokenizer_config={"pad_token": "ab"})
    assert tokenizer.decode(tokenizer.encode("ab!")) == "ab!"
    assert len(tokenizer.encode("ab!")) == 2


def test_bos_comes_first_where_the_post_processor_puts_it(tmp_path: Path) -> None:
    written = tokenizer_json(post_processor=post_processor("<|im_start|>", 260))
    tokenizer = load(tmp_path, written, tokenizer_config=NAMES)
    assert tokenizer.encode("ab", add_bos=True) == [260, *tokenizer.encode("ab")]
    assert tokenizer.encode_special("<|im_start|>ab") == [260, *tokenizer.encode("ab")]


def test_the_config_has_the_last_word_on_bos(tmp_path: Path) -> None:
    written = tokenizer_json(post_processor=post_processor("<|im_start|>", 260))
    assert not load(tmp_path, written, tokenizer_config=NAMES | {"add_bos_token": False}).adds_bos
    assert load(
        tmp_path, tokenizer_json(), tokenizer_config=NAMES | {"add_bos_token": True}
    ).adds_bos


def test_long_texts_are_never_cut_and_short_ones_never_padded(tmp_path: Path) -> None:
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 8},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    tokenizer = load(tmp_path, tokenizer_json(truncation=cut, padding=padding))
    assert tokenizer.encode("xyz xyz") == [*b"WXY", 220, *b"WXY"]


def test_merges_may_be_written_as_lists_or_as_texts(tmp_path: Path) -> None:
    written = tokenizer_json()
    by_lists = load(tmp_path, written).encode("ab a\n\n")
    written["model"]["merges"] = MERGES
    assert load(tmp_path, written).encode("ab a\n\n") == by_lists


def test_a_control_token_outside_the_model_s_vocabulary_keeps_its_id(tmp_path: Path) -> None:
    written = tokenizer_json()
    for token in ("<|end|>", "<|im_start|>"):
        del written["model"]["vocab"][token]
    tokenizer = load(tmp_path, written, tokenizer_config=NAMES)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (260, (259,))
    assert tokenizer.encode_special("<|im_start|>ab<|end|>") == [260, 256, 259]
    assert not any(map(tokenizer.is_control, tokenizer.encode("<|im_start|>ab<|end|>")))


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({"tokenizer_config": {"chat_template": "one"}}, "one"),
        ({"tokenizer_config": {"chat_template": [{"name": "tool_use", "template": "x"}]}}, None),
        (
            {
                "tokenizer_config": {
                    "chat_template": [
                        {"name": "tool_use", "template": "x"},
                        {"name": "default", "template": "two"},
                    ]
                }
            },
            "two",
        ),
        ({"chat_template": {"chat_template": "three"}, "tokenizer_config": {}}, "three"),
        ({}, None),
    ],
)
def test_the_chat_template_is_found_wherever_it_is_kept(
    tmp_path: Path, files: dict[str, object], template: str | None
) -> None:
    assert load(tmp_path, tokenizer_json(), **files).chat_template == template


def test_a_template_file_comes_before_all_others(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("four\n")
    files = {"tokenizer_config": {"chat_template": "one"}}
    assert load(tmp_path, tokenizer_json(), **files).chat_template == "four\n"


def test_transformers_reads_the_same_ids_from_the_folder(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = load(tmp_path, tokenizer_json(), tokenizer_config=NAMES)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    text = "ab  12\n\n1 <|im_start|>a <think>é<|end|>"
    assert tokenizer.encode_special(text) == theirs(text).input_ids
    assert tokenizer.decode(tokenizer.encode_special(text), skip_special=False) == theirs.decode(
        theirs(text).input_ids, clean_up_tokenization_spaces=False
    )


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadModelFile, match=r"has no tokenizer\.json; save the fast tokenizer"):
        from_hf(tmp_path)


def test_a_broken_tokenizer_is_refused_by_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadModelFile, match=r"tokenizer\.json cannot be read: Expecting"):
        from_hf(tmp_path)
    with pytest.raises(BadModelFile, match=r"tokenizer\.json is not a JSON object"):
        load(tmp_path, [])
    with pytest.raises(BadModelFile, match=r"tokenizer\.json is not a tokenizer we can load"):
        load(tmp_path, {"model": {"type": "Klingon"}})
    with pytest.raises(BadModelFile, match="has no token '<nope>', named as eos_token"):
        load(tmp_path, tokenizer_json(), tokenizer_config={"eos_token": "<nope>"})


@pytest.mark.parametrize(
    ("decoder", "problem"),
    [
        (None, "decoder null is not one we can stream"),
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "decoder WordPiece is not one"),
        (
            {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "x"}, "content": "y"},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                ],
            },
            "decoder replaces {'String': 'x'} by 'y'",
        ),
    ],
)
def test_a_decoder_that_cannot_be_streamed_is_refused(
    tmp_path: Path, decoder: object, problem: str
) -> None:
    with pytest.raises(BadModelFile) as refused:
        load(tmp_path, tokenizer_json(decoder=decoder))
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("scheme", "expected"), [("always", "ab  ab"), ("first", "ab  ab"), ("never", " ab  ab")]
)
def test_a_metaspace_decoder_drops_the_spaces_it_put_first(
    tmp_path: Path, scheme: str, expected: str
) -> None:
    written = tokenizer_json(
        decoder={"type": "Metaspace", "replacement": "Ġ", "prepend_scheme": scheme, "split": True}
    )
    tokenizer = load(tmp_path, written)
    ids = tokenizer.encode(" ab  ab")
    assert tokenizer.decode(ids) == expected
