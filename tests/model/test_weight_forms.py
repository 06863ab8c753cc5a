"""What a form of weights costs in accuracy, on the real model; and what it does not depend on."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from kvcache.head_map import HeadMap
from model.comm import Comm
from model.errors import BadModelFile
from model.model import Model
from model.source import ModelSource, open_model
from model.weight_form import WeightForm
from tests.model.paged_run import PagedRun
from tests.model.tiny_checkpoints import make_tiny, save_tiny
from tests.model.tiny_gguf import write_gguf

torch.set_num_threads(1)

TEXTS = (
    "The river rises in the hills above the old mill town and runs south for forty miles before it"
    " reaches the sea. In spring, when the snow melts, it floods the meadows on both banks, and the"
    " farmers move their cattle to higher ground. For most of the year, however, it is shallow"
    " enough to be crossed on foot, and children catch small fish under the stone bridge.",
    "Water boils at one hundred degrees Celsius at sea level, because that is the temperature at"
    " which its vapour pressure equals the pressure of the atmosphere. On a high mountain the air"
    " is thinner, so water boils at a lower temperature, and potatoes take longer to cook.",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n    if not"
    " values:\n        raise ValueError('no values')\n    return total / len(values)\n\n\ndef"
    " median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n    if"
    " len(ordered) % 2:\n        return ordered[middle]\n    return (ordered[middle - 1] +"
    " ordered[middle]) / 2\n",
    "Question: What is the capital of France, and which river flows through it?\nAnswer: The"
    " capital of France is Paris, and the river Seine flows through it.\nQuestion: What is the"
    " capital of Italy, and which river flows through it?\nAnswer: The capital of Italy is Rome,"
    " and the river Tiber flows through it.",
)


class Cost(NamedTuple):
    """Against fp32 products of the values the file holds, over every token of the texts."""

    nll: float  # nats a token more
    kl: float  # of the next token's distribution
    agreement: float  # of the likeliest next token


# Measured: bf16 0.0002, 0.00005, 1; stored 0.0002, 0.0025, 0.966; int8 0.0079, 0.0039, 0.966;
# int4 0.050, 0.050, 0.908.
BARS: dict[WeightForm, Cost] = {
    "bf16": Cost(0.002, 0.0005, 0.99),
    "stored": Cost(0.02, 0.008, 0.94),
    "int8": Cost(0.02, 0.009, 0.94),
    "int4": Cost(0.12, 0.11, 0.84),
}


def runner(source: ModelSource, weights: WeightForm, tp: int = 1, block_size: int = 16) -> PagedRun:
    def load(head_map: HeadMap, comm: Comm) -> Model:
        return source.load(head_map, comm.rank, comm, block_size=block_size, weights=weights)

    config = source.config
    head_map = HeadMap.even(config.num_query_heads, config.num_kv_heads, tp)
    return PagedRun(load, head_map, num_blocks=96)


@pytest.fixture(scope="module")
def smollm2() -> ModelSource:
    return open_model("smollm2")


@pytest.fixture(scope="module")
def texts(smollm2: ModelSource) -> list[list[int]]:
    return [smollm2.tokenizer().encode(text, add_bos=True) for text in TEXTS]


@pytest.fixture(scope="module")
def runs(smollm2: ModelSource) -> Callable[[WeightForm], PagedRun]:
    made: dict[WeightForm, PagedRun] = {}

    def run(form: WeightForm) -> PagedRun:
        if form not in made:
            made[form] = runner(smollm2, form)
        return made[form]

    return run


@pytest.fixture(scope="module")
def dense(runs: Callable[[WeightForm], PagedRun], texts: list[list[int]]) -> Tensor:
    return distributions(runs("dense"), texts)


def distributions(run: PagedRun, texts: list[list[int]]) -> Tensor:
    """Log-probabilities of every next token, all texts in one batch."""
    names = [f"text {number}" for number in range(len(texts))]
    num_rows = sum(map(len, texts))
    logits = run.step(dict(zip(names, texts, strict=True)), rows=range(num_rows))
    return logits.log_softmax(dim=1)


def cost(found: Tensor, expected: Tensor, texts: list[list[int]]) -> Cost:
    starts = torch.tensor([0, *(len(text) for text in texts[:-1])]).cumsum(0)
    lengths = [len(text) - 1 for text in texts]  # nothing comes after a text's last token
    rows = torch.cat([s + torch.arange(n) for s, n in zip(starts, lengths, strict=True)])
    after = torch.tensor([token for text in texts for token in text[1:]])[:, None]
    found, expected = found[rows], expected[rows]
    return Cost(
        (expected.gather(1, after) - found.gather(1, after)).mean().item(),
        (expected.exp() * (expected - found)).sum(dim=1).mean().item(),
        (found.argmax(dim=1) == expected.argmax(dim=1)).float().mean().item(),
    )


@pytest.mark.parametrize("form", BARS)
def test_a_form_costs_no_more_accuracy_than_it_may(
    form: WeightForm,
    runs: Callable[[WeightForm], PagedRun],
    texts: list[list[int]],
    dense: Tensor,
) -> None:
    measured, bar = cost(distributions(runs(form), texts), dense, texts), BARS[form]
    assert abs(measured.nll) <= bar.nll
    assert measured.kl <= bar.kl
    assert measured.agreement >= bar.agreement
    if form == "int4":  # the bars are such that something fails them
        assert measured.kl > BARS["int8"].kl


def test_a_request_gets_the_same_tokens_alone_and_in_a_batch(
    smollm2: ModelSource, runs: Callable[[WeightForm], PagedRun], texts: list[list[int]]
) -> None:
    run, num_tokens = runs("stored"), 12
    prompts = {f"prompt {number}": text[:40] for number, text in enumerate(texts)}
    alone = {
        name: run.greedy(f"{name} alone", prompt, num_tokens) for name, prompt in prompts.items()
    }
    together = {name: [int(run.step({name: prompt}).argmax())] for name, prompt in prompts.items()}
    for _ in range(num_tokens - 1):
        logits = run.step({name: tokens[-1:] for name, tokens in together.items()})
        for tokens, row in zip(together.values(), logits, strict=True):
            tokens.append(int(row.argmax()))
    assert together == alone


TINY_SHAPE = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 70}
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("form", ["stored", "int8", "int4"])
def test_every_tensor_parallel_size_gives_nearly_the_logits_of_one(
    form: WeightForm, tp: int, tmp_path: Path
) -> None:
    # Nearly: a rank that holds part of a group of inputs quantises its rows by that part alone.
    write_gguf(
        tmp_path / "tiny.gguf", make_tiny("llama GQA tied", **TINY_SHAPE), GGMLQuantizationType.Q4_1
    )
    source = open_model(str(tmp_path / "tiny.gguf"))
    one = runner(source, form).prefill("a", TOKENS)
    several = runner(source, form, tp).prefill("a", TOKENS, chunk=5)
    assert (several - one).norm() <= 0.06 * one.norm()


@pytest.mark.parametrize("case", ["llama with every bias", "qwen3", "llama MHA untied"])
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_widths_that_are_no_whole_groups_are_packed_too(
    form: WeightForm, case: str, tmp_path: Path
) -> None:
    save_tiny(case, tmp_path / "model")
    source = open_model(str(tmp_path / "model"))
    exact = runner(source, "dense").prefill("a", TOKENS)
    packed = runner(source, form).prefill("a", TOKENS)
    assert 0 < (packed - exact).norm() <= {"int8": 0.05, "int4": 0.5}[form] * exact.norm()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_packed_weights_go_with_half_precision_too(dtype: str, tmp_path: Path) -> None:
    save_tiny("llama GQA tied", tmp_path / "model")
    source = open_model(str(tmp_path / "model"))
    exact = runner(source, "dense").prefill("a", TOKENS)
    load = partial(load_half, source=source, dtype=dtype)
    packed = PagedRun(load, HeadMap.even(4, 2, 1)).prefill("a", TOKENS)
    assert (packed - exact).norm() <= 0.08 * exact.norm()


def load_half(head_map: HeadMap, comm: Comm, source: ModelSource, dtype: str) -> Model:
    return source.load(head_map, comm.rank, comm, dtype=dtype, weights="int8")


def test_plain_files_hold_nothing_to_keep_as_stored(tmp_path: Path) -> None:
    save_tiny("llama GQA tied", tmp_path / "model")
    with pytest.raises(BadModelFile, match="so none can be kept as stored"):
        runner(open_model(str(tmp_path / "model")), "stored")


def test_values_of_different_forms_never_share_a_namespace(smollm2: ModelSource) -> None:
    forms = ("dense", "bf16", "stored", "int8", "int4")
    assert len({smollm2.namespace("float32", form) for form in forms}) == 5
    assert smollm2.namespace("float32", "dense") == smollm2.namespace()
    checksum = open_model("checksum")
    assert checksum.namespace("float32", "int8") == checksum.namespace()


@pytest.mark.parametrize("form", ["bf16", "stored", "int4"])
def test_blocks_and_chunks_of_any_size_give_the_same_bits(form: WeightForm, tmp_path: Path) -> None:
    write_gguf(
        tmp_path / "tiny.gguf", make_tiny("llama GQA tied", **TINY_SHAPE), GGMLQuantizationType.Q8_0
    )
    source = open_model(str(tmp_path / "tiny.gguf"))
    whole = runner(source, form).prefill("a", TOKENS * 5)
    for block_size, chunk in [(8, None), (64, 7), (16, 2), (128, 33)]:
        paged = runner(source, form, block_size=block_size)
        assert torch.equal(paged.prefill("a", TOKENS * 5, chunk), whole)
