"""Curves find what workers do, whatever they believed before, and are not led astray."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.curves import DecodeFit, LinkFit, PrefillCurve, PrefillFit

PROBES = ((16, 0), (16, 7000), (1000, 0), (4000, 4000), (8000, 0))


def took(uncached: int, cached: int) -> float:
    return 5 + 0.3 * uncached + 1e-5 * uncached * (cached + uncached / 2)


def fed(fit: PrefillFit, rng: random.Random, num: int, factor: float = 1.0) -> PrefillFit:
    for _ in range(num):
        length = rng.randrange(16, 8000)
        cached = rng.randrange(0, length)
        fit.learn(length - cached, cached, factor * took(length - cached, cached))
    return fit


@pytest.mark.parametrize("believed_ms", [0.1, 0.3, 1.0])
def test_a_prompts_curve_is_found_within_twenty_prompts(believed_ms: float) -> None:
    fit = fed(PrefillFit(PrefillCurve(token_ms=believed_ms)), random.Random(1), 20)
    for probe in PROBES:
        assert fit.curve.ms(*probe) == pytest.approx(took(*probe), rel=0.1)


def test_a_hiccup_now_and_then_moves_no_curve() -> None:
    rng = random.Random(2)
    fit = PrefillFit(PrefillCurve(token_ms=0.1))
    for _ in range(30):
        fed(fit, rng, 9)
        fed(fit, rng, 1, factor=30)
    for probe in PROBES:
        assert fit.curve.ms(*probe) == pytest.approx(took(*probe), rel=0.1)


@pytest.mark.parametrize("factor", [0.33, 3.0])
def test_a_lasting_change_is_followed_within_thirty_prompts(factor: float) -> None:
    rng = random.Random(3)
    fit = fed(fed(PrefillFit(PrefillCurve(token_ms=0.1)), rng, 300), rng, 30, factor)
    for probe in PROBES:
        assert fit.curve.ms(*probe) == pytest.approx(factor * took(*probe), rel=0.1)


def test_a_thousand_equal_prompts_teach_nothing_about_others_and_unlearn_nothing() -> None:
    fit = PrefillFit(PrefillCurve(token_ms=0.3))
    for _ in range(1000):
        fit.learn(1000, 0, 300)
    assert fit.curve.ms(1000, 0) == pytest.approx(300, rel=0.02)
    assert 300 < fit.curve.ms(4000, 0) < 16 * 310
    fed(fit, random.Random(4), 60)
    for probe in PROBES[2:]:
        assert fit.curve.ms(*probe) == pytest.approx(took(*probe), rel=0.15)


@settings(max_examples=40)
@given(
    believed_ms=st.floats(1e-3, 50),
    said=st.lists(
        st.tuples(st.integers(1, 9000), st.integers(0, 9000), st.floats(0, 1e7)), max_size=60
    ),
)
def test_whatever_is_observed_no_prediction_is_negative_or_endless(
    believed_ms: float, said: list[tuple[int, int, float]]
) -> None:
    fit = PrefillFit(PrefillCurve(token_ms=believed_ms))
    for uncached, cached, ms in said:
        fit.learn(uncached, cached, ms)
        for probe in PROBES:
            assert 0 <= fit.curve.ms(*probe) < 1e4 + 50 * believed_ms * 8000 * 3


def test_a_steps_curve_tells_sequences_from_context() -> None:
    rng = random.Random(5)
    fit = DecodeFit(1, 100, 12.0)
    for _ in range(60):
        sequences, context = rng.uniform(1, 32), rng.uniform(100, 100_000)
        fit.learn(sequences, context, 12 + 0.5 * sequences + 2e-4 * context)
    assert fit.curve.ms(1, 100) == pytest.approx(12.5, rel=0.05)
    assert fit.curve.ms(32, 0) == pytest.approx(28, rel=0.05)
    assert fit.curve.ms(1, 100_000) == pytest.approx(32.5, rel=0.05)


def test_a_shipment_that_waited_for_its_compute_says_only_that_the_link_is_no_slower() -> None:
    fit = LinkFit()
    fast = fit.curve
    for _ in range(50):
        fit.learn(1_000_000, 0, ms=1000.0, hidden_ms=990.0)
    assert fit.curve == fast
    for _ in range(50):
        fit.learn(1_000_000, 0, ms=500.0, hidden_ms=20.0)
    assert fit.curve.ms(1_000_000) == pytest.approx(500, rel=0.05)
    for _ in range(50):
        fit.learn(1_000_000, 0, ms=100.0, hidden_ms=100.0)
    assert fit.curve.ms(1_000_000) == pytest.approx(50, rel=0.05)


@pytest.mark.parametrize("uncached", [1, 16, 128, 1024, 8192])
@pytest.mark.parametrize("cached", [0, 500])
def test_one_prompt_alone_is_no_reason_to_expect_ten_times_as_much_of_others(
    uncached: int, cached: int
) -> None:
    """Whatever a prompt takes besides its tokens."""
    for fixed_ms in (0, 2, 10, 50):
        for token_ms in (0.02, 0.1, 1.0):
            worker = PrefillCurve(fixed_ms, token_ms, token_ms / 8192)
            ms = worker.ms(uncached, cached)
            fit = PrefillFit.after_one(uncached, ms)
            fit.learn(uncached, cached, ms)
            for probe in PROBES:
                assert fit.curve.ms(*probe) < 10 * worker.ms(*probe)


@pytest.mark.parametrize("uncached", [1, 16, 1024, 8192])
def test_with_others_at_work_one_prompt_tells_how_long_any_other_takes(uncached: int) -> None:
    """It is half as slow again. A few milliseconds may be a prompt's or its tokens'."""
    for fixed_ms in (0, 2, 10, 50):
        for token_ms in (0.02, 0.1, 1.0):
            others = PrefillCurve(fixed_ms, token_ms, token_ms / 8192)
            worker = others.times(1.5)
            fit = PrefillFit(others)
            fit.learn(uncached, 0, worker.ms(uncached, 0))
            for probe in PROBES:
                took_ms = worker.ms(*probe)
                assert took_ms / 2 < fit.curve.ms(*probe) < 2 * took_ms + 5
