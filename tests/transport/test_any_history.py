"""Whatever the order of events, both ends of a transfer tell the same story and come to an end."""

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.transport.any_history import AnyHistory

NUM_STEPS = 20_000  # at least, over all histories


def test_any_order_of_events_keeps_every_promise_and_comes_to_an_end() -> None:
    before = AnyHistory.num_steps
    shape = settings(max_examples=150, stateful_step_count=20, deadline=None)
    run_state_machine_as_test(AnyHistory, settings=shape)
    assert AnyHistory.num_steps - before >= NUM_STEPS
