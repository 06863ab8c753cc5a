"""SmolLM2 read by us and by transformers, side by side."""

import random
import re
from itertools import pairwise

import pytest

from model.chat_template import ChatTemplate
from model.tokenizer import Tokenizer
from tests.model.smollm2 import smollm2
from tests.model.test_tokenizer import HARD_STRINGS
from tests.model.transformers_smollm2 import TransformersTokenizer, transformers_smollm2

ALPHABET = [
    *map(chr, range(0x20, 0x7F)),
    *"\n\n\n\t\r   0123456789 \u00a0\u2003\u200d\ufe0f\u0301éßñ²½",
    *"日本語한국어אبتथา👍🏽👨👩🚒🇫🇷",
]


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return smollm2()


@pytest.fixture(scope="module")
def theirs() -> TransformersTokenizer:
    return transformers_smollm2(splits_digits=True)


def random_texts(count: int) -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices(ALPHABET, k=rng.randint(1, 60))) for _ in range(count)]


def test_hard_strings_have_transformers_ids(ours: Tokenizer, theirs: TransformersTokenizer) -> None:
    for hard in HARD_STRINGS:
        assert ours.encode(hard.text) == theirs.plain_ids(hard.text), hard.name
        assert ours.encode_special(hard.text) == theirs.ids(hard.text), hard.name


def test_random_texts_have_transformers_ids(ours: Tokenizer, theirs: TransformersTokenizer) -> None:
    for text in random_texts(1000):
        assert ours.encode(text) == theirs.ids(text), text


def test_the_gguf_reader_of_transformers_differs_only_where_a_number_follows_white_space(
    ours: Tokenizer,
) -> None:
    """It knows no word rule for `smollm`, and takes GPT-2's; see make_hard_strings.py."""
    as_read = transformers_smollm2(splits_digits=False)
    for hard in HARD_STRINGS:
        agrees = ours.encode(hard.text) == as_read.plain_ids(hard.text)
        assert agrees == hard.gguf_reader_agrees, hard.name
    for text in random_texts(300):
        if not any(a.isspace() and b.isnumeric() for a, b in pairwise(text)):
            assert ours.encode(text) == as_read.ids(text), text


def test_any_tokens_have_transformers_text(ours: Tokenizer, theirs: TransformersTokenizer) -> None:
    rng = random.Random(0)
    for _ in range(500):
        ids = [rng.randrange(49152) for _ in range(rng.randint(1, 20))]
        for skip in (True, False):
            assert ours.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special=skip)


def test_harmless_chats_have_transformers_ids(
    ours: Tokenizer, theirs: TransformersTokenizer
) -> None:
    template = ChatTemplate(ours.chat_template, ours.special_tokens)
    harmless = [h.text for h in HARD_STRINGS if not re.search(r"<\|(im_end|endoftext)", h.text)]
    assert len(harmless) > 50
    for text in harmless:
        turns = [
            {"role": "system", "content": text},
            {"role": "user", "content": "  " + text},
            {"role": "assistant", "content": text + "\n"},
            {"role": "user", "content": "go on"},
        ]
        for messages in (turns, turns[1:], turns[:2]):
            for generate in (True, False):
                assert template.render_ids(messages, ours, generate) == theirs.chat_ids(
                    messages, generate
                )
