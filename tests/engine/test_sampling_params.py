import math
import subprocess
import sys
from typing import Any

import pytest

from engine.sampling_params import (
    InvalidParam,
    Limits,
    SamplingParams,
    check_prompt,
    choice_seed,
    resolve,
)
from protos import inference_pb2 as pb

LIMITS = Limits(max_context=8192, vocab_size=49_152, eos_token_ids=(2,))


def test_an_empty_request_gets_every_default() -> None:
    assert resolve({}, LIMITS, num_prompt_tokens=8000, seed=7) == SamplingParams(
        max_tokens=192,
        min_tokens=0,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        logit_bias=(),
        allowed_token_ids=(),
        stop_token_ids=(),
        stop=(),
        ignore_eos=False,
        logprobs=None,
        seed=7,
        n=1,
    )
    assert resolve({}, LIMITS).max_tokens == 256


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("max_tokens", 0, "a whole number from 1 to 8192"),
        ("max_tokens", 2**31, "a whole number from 1 to 8192"),
        ("max_tokens", -1, "a whole number from 1 to 8192"),
        ("max_tokens", 1.5, "a whole number"),
        ("max_tokens", True, "a whole number"),
        ("min_tokens", 300, "from 0 to 256"),
        ("temperature", math.nan, "greater|from 0 and at most 2"),
        ("temperature", math.inf, "at most 2"),
        ("temperature", -1, "at most 2"),
        ("temperature", -1e-6, "at most 2"),
        ("temperature", 2.1, "at most 2"),
        ("temperature", 10**400, "at most 2"),
        ("temperature", "hot", "a number"),
        ("top_p", 0, "greater than 0 and at most 1"),
        ("top_p", 1.1, "greater than 0 and at most 1"),
        ("min_p", -0.1, "from 0 and at most 1"),
        ("top_k", -5, "from -1"),
        ("repetition_penalty", 0, "greater than 0 and at most 10"),
        ("presence_penalty", 2.5, "from -2 and at most 2"),
        ("frequency_penalty", math.nan, "from -2 and at most 2"),
        ("logprobs", 21, "from 0 to 20"),
        ("seed", -1, "from 0 to 18446744073709551615"),
        ("n", 0, "from 1 to 16"),
        ("n", 10**9, "from 1 to 16"),
        ("stop", [""], "strings of 1 to 256 characters"),
        ("stop", ["x" * 257], "strings of 1 to 256 characters"),
        ("stop", ["\ud800"], "valid Unicode"),
        ("stop", [3], "strings"),
        ("stop", ["a"] * 100_000, "at most 16 entries"),
        ("logit_bias", {i: 1.0 for i in range(1025)}, "at most 1024 entries"),
        ("logit_bias", [1], "map token ids"),
        ("allowed_token_ids", range(4097), "at most 4096 token ids"),
        ("stop_token_ids", range(129), "at most 128 token ids"),
        ("ignore_eos", "yes", "true or false"),
        ("best_of", 3, "not a sampling field"),
    ],
)
def test_a_value_outside_its_limit_is_refused_with_field_and_limit(
    field: str, value: object, limit: str
) -> None:
    with pytest.raises(InvalidParam, match=limit) as raised:
        resolve({field: value}, LIMITS)
    assert raised.value.field == field
    assert str(raised.value).startswith(field)
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize("token_id", [49_152, -1, 2**31 - 1, 2**31, 2**63 - 1])
@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids", "stop_token_ids", "prompt"])
def test_a_token_outside_the_vocabulary_is_refused_wherever_it_stands(
    field: str, token_id: int
) -> None:
    value: Any = {token_id: 1.0} if field == "logit_bias" else [5, token_id]
    with pytest.raises(InvalidParam, match="token ids from 0 to 49151") as raised:
        if field == "prompt":
            check_prompt(value, LIMITS)
        else:
            resolve({field: value}, LIMITS)
    assert raised.value.field == field
    if field != "prompt":
        with pytest.raises(InvalidParam, match="token ids from 0 to 49151"):
            resolve(pb.SamplingParams(**{field: value}), LIMITS)


@pytest.mark.parametrize("bias", [math.nan, math.inf, -101, "1"])
def test_a_bias_outside_its_range_is_refused_with_its_token(bias: object) -> None:
    with pytest.raises(InvalidParam, match=r"logit_bias\[7\] must be a number from -100 to 100"):
        resolve({"logit_bias": {"7": bias}}, LIMITS)


@pytest.mark.parametrize(
    ("num_tokens", "limit"),
    [(0, "at least 1 token"), (8192, "at most 8191 tokens"), (9000, "at most 8191 tokens")],
)
def test_a_prompt_must_leave_room_for_one_token(num_tokens: int, limit: str) -> None:
    with pytest.raises(InvalidParam, match=limit):
        check_prompt([1] * num_tokens, LIMITS)
    check_prompt([1] * 8191, LIMITS)


def test_max_tokens_may_not_exceed_what_the_prompt_leaves() -> None:
    limit = r"from 1 to 192 \(the context of 8192 less the prompt\), got 193"
    with pytest.raises(InvalidParam, match=limit):
        resolve({"max_tokens": 193}, LIMITS, num_prompt_tokens=8000)


def test_tokens_that_all_end_the_text_cannot_be_the_only_ones_allowed_under_min_tokens() -> None:
    fields: dict[str, object] = {"allowed_token_ids": [2, 9], "stop_token_ids": [9]}
    assert resolve(fields, LIMITS).allowed_token_ids == (2, 9)
    with pytest.raises(InvalidParam, match="must leave a token that does not end the text"):
        resolve({**fields, "min_tokens": 1}, LIMITS)
    assert resolve({**fields, "min_tokens": 1, "ignore_eos": True}, LIMITS).min_tokens == 1


def test_ids_come_out_ascending_and_once_and_json_keys_are_read() -> None:
    params = resolve(
        {"stop_token_ids": [9, 3, 9], "logit_bias": {"12": -1, "5": 2.5}, "stop": "end"}, LIMITS
    )
    assert params.stop_token_ids == (3, 9)
    assert params.logit_bias == ((5, 2.5), (12, -1.0))
    assert params.stop == ("end",)


def test_top_k_off_is_0_minus_1_or_the_whole_vocabulary() -> None:
    assert [resolve({"top_k": k}, LIMITS).top_k for k in (0, -1, 49_152, 49_151)] == [
        0,
        0,
        0,
        49_151,
    ]


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (1e-7, True), (1e-4, False)])
def test_a_temperature_that_says_nothing_but_largest_is_greedy(
    temperature: float, greedy: bool
) -> None:
    assert resolve({"temperature": temperature}, LIMITS).greedy is greedy


def test_resolved_params_come_back_whole_from_the_wire() -> None:
    full = SamplingParams(
        max_tokens=5,
        min_tokens=1,
        temperature=0.7,
        top_k=40,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias=((1, 2.5), (7, -1.0)),
        allowed_token_ids=(1, 7),
        stop_token_ids=(3,),
        stop=("a", "b"),
        ignore_eos=True,
        logprobs=0,
        seed=2**64 - 1,
        n=3,
    )
    for params in (full, SamplingParams(max_tokens=1)):
        sent = pb.SamplingParams.FromString(params.to_proto().SerializeToString())
        assert SamplingParams.from_proto(sent) == params
        assert resolve(sent, LIMITS) == params
    with pytest.raises(InvalidParam, match="top_p must be resolved"):
        SamplingParams.from_proto(
            pb.SamplingParams(max_tokens=1, min_tokens=0, temperature=1, top_k=0)
        )


def test_choice_seeds_are_a_contract() -> None:
    assert [choice_seed(1, choice) for choice in range(3)] == [
        1,
        1660239559302127978,
        1160753652936945664,
    ]


def test_sampling_params_and_clock_load_no_torch() -> None:
    code = "import sys, engine.sampling_params, engine.clock; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
