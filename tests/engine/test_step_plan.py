import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.step_plan import Kind, SlicePlan, StepPlan

ints = st.integers(0, 2**62)
tuples = st.lists(ints, max_size=5).map(tuple)
slices = st.builds(SlicePlan, ints, ints, tuples, tuples, st.booleans())
plans = st.builds(
    StepPlan,
    ints,
    st.lists(slices, max_size=4).map(tuple),
    st.lists(st.tuples(ints, ints), max_size=3).map(tuple),
    st.sampled_from(Kind),
    tuples,
)


@given(plans)
def test_a_plan_comes_back_whole_from_its_array(plan: StepPlan) -> None:
    assert StepPlan.decode(plan.encode()) == plan


def test_the_array_is_a_contract() -> None:
    part = SlicePlan(7, start=16, token_ids=(5, 6), block_table=(3, 1), wants_logits=True)
    plan = StepPlan(9, (part,), copies=((4, 8),))
    assert plan.encode().tolist() == [1, 9, 1, 1, 0, 4, 8, 7, 16, 1, 2, 2, 5, 6, 3, 1]
    check = StepPlan(0, kind=Kind.CHECK, checks=(3, 1))
    assert check.encode().tolist() == [4, 0, 0, 0, 2, 3, 1]


def test_a_plan_cut_short_or_too_long_is_refused() -> None:
    array = StepPlan(9, (SlicePlan(7, 0, (5,), (3,), True),)).encode()
    for broken in (array[:2], array[:-1]):
        with pytest.raises(ValueError, match=r"a step plan|step plan 9|not enough values"):
            StepPlan.decode(broken)
