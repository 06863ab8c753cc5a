"""What is held against a link and against a worker, and for how long: no clock, no wire."""

from dataclasses import replace

import pytest

from transport.config import TransportConfig
from transport.damage_rate import DamageRate
from transport.orders import Lender, ShipmentKey
from transport.quarantine import LinkName, Quarantined, Quarantines, Standing

CONFIG = TransportConfig(
    damage_window_s=100.0,
    max_damage_share=0.01,
    forgiven_chunks=2,
    suspect_wires=2,
    cool_down_s=10.0,
    max_cool_down_s=35.0,
)
TCP = LinkName("p0", 1, 0, "tcp")
SHM = replace(TCP, wire="shm")
KEY = ShipmentKey(b"one", 1, 1, 1)
OTHER = ShipmentKey(b"two", 1, 1, 1)


def broken(quarantines: Quarantines, name: LinkName, now: float) -> list[Quarantined]:
    """Three damaged chunks: one more than is forgiven."""
    return [each for _ in range(3) for each in quarantines.landed(name, 10, 1, now)]


def wires(found: list[Quarantined]) -> list[str]:
    return [each.wire for each in found]


def test_what_came_long_ago_counts_little() -> None:
    rate = DamageRate(window_s=100.0)
    rate.add(0.0, 100, 50)
    assert rate.share == 0.5
    rate.add(100.0, 100, 0)
    assert rate.share == pytest.approx(50 / 2.71828 / (100 / 2.71828 + 100), rel=1e-3)
    rate.add(1000.0, 100, 0)
    assert rate.share < 1e-4


def test_a_few_accidents_are_forgiven_whatever_they_damaged() -> None:
    rate = DamageRate(window_s=100.0)
    for _ in range(2):
        rate.add(0.0, 1000, 1000)
    assert not rate.exceeds(0.01, num_forgiven=2)
    rate.add(0.0, 1000, 1)
    assert rate.exceeds(0.01, num_forgiven=2)


def test_many_accidents_among_very_many_cells_are_no_reason() -> None:
    quarantines = Quarantines(CONFIG)
    for _ in range(50):
        assert quarantines.landed(TCP, 1_000, 1, now=0.0) == []
    assert quarantines.call(TCP, now=0.0) is None
    assert quarantines.standing(now=0.0) == []


def test_a_link_that_damages_too_much_is_left_alone_until_its_cool_down_is_over() -> None:
    quarantines = Quarantines(CONFIG)
    (found,) = broken(quarantines, TCP, now=5.0)
    assert found.reason == "3 of the last 30 cells came damaged over tcp"
    assert (found.worker, found.epoch, found.wire, found.left_s) == ("p0", 1, "tcp", 10.0)
    assert quarantines.call(TCP, now=14.9) is not None
    assert quarantines.opens(TCP, KEY, now=14.9) is not None  # over the link it still has
    assert quarantines.call(SHM, now=5.0) is None
    assert quarantines.call(replace(TCP, rank=1), now=5.0) is None
    assert wires(quarantines.standing(now=14.9)) == ["tcp"]
    assert quarantines.standing(now=15.0) == []
    assert quarantines.call(TCP, now=15.0) is None


def test_one_clean_transfer_clears_a_link_and_nobody_else_is_let_in_meanwhile() -> None:
    quarantines = Quarantines(CONFIG)
    broken(quarantines, TCP, now=0.0)
    assert quarantines.call(TCP, now=10.0) is None
    assert quarantines.opens(TCP, KEY, now=10.0) is not None  # it is the only one
    refusal = quarantines.call(TCP, now=10.5)
    assert refusal is not None
    assert refusal.reason == "one transfer is trying it again"
    assert quarantines.opens(TCP, OTHER, now=10.5) is not None
    assert quarantines.landed(TCP, 10, 0, now=10.5) == []
    assert not quarantines.ended(TCP, OTHER, committed=True)
    assert quarantines.ended(TCP, KEY, committed=True)
    assert quarantines.call(TCP, now=11.0) is None
    assert quarantines.opens(TCP, OTHER, now=11.0) is None
    # Nothing of before is held against it.
    assert [quarantines.landed(TCP, 10, 1, now=11.0) for _ in range(2)] == [[], []]


@pytest.mark.parametrize("committed", [False, True])
def test_a_trial_that_brings_no_cell_or_fails_decides_nothing(committed: bool) -> None:
    quarantines = Quarantines(CONFIG)
    broken(quarantines, TCP, now=0.0)
    quarantines.call(TCP, now=10.0)
    quarantines.opens(TCP, KEY, now=10.0)
    if not committed:
        quarantines.landed(TCP, 10, 0, now=10.0)
    assert not quarantines.ended(TCP, KEY, committed=committed)
    assert quarantines.call(TCP, now=10.0) is None  # the next one decides
    assert quarantines.opens(TCP, OTHER, now=10.0) is not None
    quarantines.landed(TCP, 10, 0, now=10.0)
    assert quarantines.ended(TCP, OTHER, committed=True)


def test_damage_on_trial_doubles_the_time_up_to_a_limit() -> None:
    quarantines = Quarantines(CONFIG)
    broken(quarantines, TCP, now=0.0)
    now, lasted = 10.0, []
    for _ in range(3):
        quarantines.call(TCP, now)
        quarantines.opens(TCP, KEY, now)
        (found,) = quarantines.landed(TCP, 1_000_000, 1, now)
        assert found.reason.endswith("over tcp, tried again")
        lasted.append(found.left_s)
        now += found.left_s
    assert lasted == [20.0, 35.0, 35.0]


def test_a_link_that_was_sound_for_long_starts_with_the_shortest_time_again() -> None:
    quarantines = Quarantines(CONFIG)
    broken(quarantines, TCP, now=0.0)
    quarantines.call(TCP, now=10.0)
    quarantines.opens(TCP, KEY, now=10.0)
    quarantines.landed(TCP, 10, 0, now=10.0)
    assert quarantines.ended(TCP, KEY, committed=True)
    (found,) = broken(quarantines, TCP, now=1000.0)
    assert found.left_s == 10.0


def test_damage_over_several_wires_is_the_workers_and_ends_all_of_them() -> None:
    quarantines = Quarantines(CONFIG)
    assert wires(broken(quarantines, TCP, now=0.0)) == ["tcp"]
    assert wires(broken(quarantines, replace(TCP, rank=1), now=0.0)) == ["tcp"]  # still one wire
    found = broken(quarantines, SHM, now=4.0)
    assert wires(found) == ["shm", ""]
    assert found[1].reason.startswith("cells came damaged over tcp and shm, the last: 3 of")
    assert quarantines.call(replace(TCP, wire="gloo"), now=13.9) is not None
    assert quarantines.call(replace(TCP, worker="p1"), now=13.9) is None
    assert wires(quarantines.standing(now=12.0)) == ["", "shm"]
    assert quarantines.call(replace(TCP, wire="gloo"), now=14.0) is None


def test_a_worker_that_damages_again_after_its_time_is_left_alone_for_twice_as_long() -> None:
    quarantines = Quarantines(CONFIG)
    broken(quarantines, TCP, now=0.0)
    broken(quarantines, SHM, now=0.0)
    assert quarantines.call(TCP, now=10.0) is None
    quarantines.opens(TCP, KEY, now=10.0)
    found = quarantines.landed(TCP, 10, 1, now=10.0)
    assert wires(found) == ["tcp", ""]
    assert [each.left_s for each in found] == [20.0, 20.0]


def test_the_next_life_of_a_worker_starts_clean_and_late_frames_of_the_last_change_nothing() -> (
    None
):
    quarantines = Quarantines(CONFIG)
    broken(quarantines, TCP, now=0.0)
    broken(quarantines, SHM, now=0.0)
    later = replace(TCP, epoch=2)
    assert quarantines.call(later, now=1.0) is None
    assert quarantines.opens(later, KEY, now=1.0) is None
    assert quarantines.landed(TCP, 10, 10, now=1.0) == []
    assert quarantines.standing(now=1.0) == []
    assert [link.standing for _, link in quarantines.links()] == [Standing.SOUND]


def test_only_so_many_workers_are_remembered() -> None:
    quarantines = Quarantines(replace(CONFIG, max_remembered=3))
    for number in range(10):
        broken(quarantines, replace(TCP, worker=f"p{number}"), now=0.0)
    assert [name.worker for name, _ in quarantines.links()] == ["p7", "p8", "p9"]


def test_calls_are_a_link_of_their_own_and_one_transfer_tries_them_again() -> None:
    quarantines = Quarantines(CONFIG)
    name = LinkName.by_call(Lender("i1", 0, "there:1", "p0", 1))
    assert (name.wire, quarantines.against(name, KEY, now=0.0)) == ("call", "")
    quarantines.calls(name, KEY, now=0.0)
    assert wires(broken(quarantines, name, now=0.0)) == ["call"]
    assert "came damaged over call" in quarantines.against(name, KEY, now=9.0)
    assert quarantines.call(TCP, now=9.0) is None  # its wires are sound

    assert quarantines.against(name, KEY, now=10.0) == ""
    quarantines.calls(name, KEY, now=10.0)
    assert quarantines.against(name, KEY, now=10.0) == ""
    assert "trying it again" in quarantines.against(name, OTHER, now=10.0)
    quarantines.landed(name, 1, 0, now=10.0)
    assert quarantines.ended(name, KEY, committed=True)
    assert quarantines.against(name, OTHER, now=10.0) == ""


def test_a_bad_wire_and_bad_calls_are_the_workers_and_calls_are_still_answered_meanwhile() -> None:
    quarantines = Quarantines(CONFIG)
    name = LinkName.by_call(Lender("i1", 0, "there:1", "p0", 1))
    other = LinkName.by_call(Lender("i1", 1, "there:2", "p0", 1))
    broken(quarantines, TCP, now=0.0)
    assert wires(broken(quarantines, name, now=0.0)) == ["call", ""]
    assert quarantines.against(other, KEY, now=0.0) == ""  # a transfer that runs may need it
    later = LinkName.by_call(Lender("i2", 0, "there:1", "p0", 2))
    assert quarantines.against(later, KEY, now=0.0) == ""  # its next life starts clean


def test_a_trial_whose_transfer_went_on_over_another_link_is_left_to_the_next_one() -> None:
    quarantines = Quarantines(CONFIG)
    broken(quarantines, TCP, now=0.0)
    assert quarantines.call(TCP, now=10.0) is None
    quarantines.opens(TCP, KEY, now=10.0)
    assert quarantines.call(TCP, now=11.0) is not None
    quarantines.ended(SHM, KEY, True)  # the wire that it ended over
    quarantines.over(KEY)
    assert quarantines.call(TCP, now=11.0) is None
    quarantines.opens(TCP, OTHER, now=11.0)
    quarantines.landed(TCP, 10, 0, now=11.0)
    assert quarantines.ended(TCP, OTHER, True)
    quarantines.over(OTHER)
    assert not quarantines._trials
