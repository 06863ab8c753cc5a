from transport.pulse import PATIENCE, Pulse, due_at


def test_a_link_beats_when_something_has_come_since_the_last_look() -> None:
    count = 5
    pulse = Pulse(lambda: count)
    assert pulse.beat_at(1.0) == float("-inf")
    count = 6
    assert pulse.beat_at(2.0) == 2.0
    assert pulse.beat_at(3.0) == 2.0
    count = 9
    assert pulse.beat_at(4.0) == 4.0


def test_who_is_not_heard_is_waited_for_while_the_link_beats_but_not_for_ever() -> None:
    assert due_at(10.0, float("-inf"), 30.0) == 40.0
    assert due_at(10.0, 25.0, 30.0) == 55.0
    assert due_at(10.0, 95.0, 30.0) == 10.0 + PATIENCE * 30.0
