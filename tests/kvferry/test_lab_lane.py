import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.lab.lane import Lane
from kvferry.lab.topology import Shape

THOUSAND_BYTES_A_SECOND = 8_000.0


def test_a_packet_takes_its_time_on_the_line_and_then_the_delay() -> None:
    lane = Lane(Shape(THOUSAND_BYTES_A_SECOND, 0.5))
    assert lane.offer(10.0, 1000) == 11.5
    assert lane.offer(10.25, 500) == 12.0  # waits for the line first
    assert lane.offer(20.0, 100) == 20.6


def test_a_packet_that_finds_the_queue_full_is_dropped() -> None:
    lane = Lane(Shape(THOUSAND_BYTES_A_SECOND, 0.5))  # holds a second: twice the delay
    assert lane.offer(0.0, 1000) == 1.5
    assert lane.offer(0.0, 1000) == 2.5
    assert lane.offer(0.0, 1) is None
    assert lane.offer(1.0, 1) == 2.501
    assert (lane.counts.num_carried, lane.counts.num_dropped) == (3, 1)


def test_an_idle_line_catches_up_on_a_burst_but_shortens_no_delay() -> None:
    lane = Lane(Shape(THOUSAND_BYTES_A_SECOND, 0.5), burst_s=1.0)
    assert lane.offer(10.0, 500) == 10.5
    assert lane.offer(10.0, 750) == 10.75
    assert lane.offer(10.0, 250) == 11.0


def test_a_lane_without_a_rate_only_delays() -> None:
    lane = Lane(Shape(None, 0.25))
    assert [lane.offer(1.0, 10**9), lane.offer(1.0, 10**9)] == [1.25, 1.25]


def test_a_cut_lane_loses_everything_and_a_healed_one_nothing() -> None:
    lane = Lane(Shape(None, 0.25))
    lane.is_cut = True
    assert lane.offer(0.0, 100) is None
    lane.is_cut = False
    assert lane.offer(1.0, 100) == 1.25
    assert lane.counts.num_lost == 1


def test_losses_come_as_often_as_asked_and_repeat_for_the_same_seed() -> None:
    def lost(seed: int) -> list[int]:
        lane = Lane(Shape(None, loss=0.01), seed)
        return [number for number in range(10_000) if lane.offer(0.0, 1) is None]

    assert len(lost(1)) == 111
    assert lost(1) == lost(1) != lost(2)


def test_a_loss_in_a_stream_holds_up_all_behind_it_for_a_round_trip() -> None:
    lane = Lane(Shape(None, 0.5, loss=1.0))
    assert lane.stream(0.0, 100, 1000) == 1.5
    lane.shape = Shape(None, 0.5)
    assert lane.stream(0.25, 100, 1000) == 1.5


def test_a_delay_made_shorter_reorders_nothing() -> None:
    lane = Lane(Shape(None, 5.0))
    assert lane.offer(0.0, 1) == 5.0
    lane.shape = Shape(None, 1.0)
    assert lane.offer(1.0, 1) == 5.0
    assert lane.offer(4.5, 1) == 5.5


OFFERS = st.lists(st.tuples(st.floats(0, 0.2), st.integers(1, 9000)), max_size=200)


@settings(max_examples=60, deadline=None)
@given(OFFERS, st.sampled_from([1e5, 1e6, 1e8]), st.sampled_from([0.0, 0.005, 0.1]))
def test_no_history_beats_the_rate_the_delay_or_the_queue(
    offers: list[tuple[float, int]], rate: float, delay: float
) -> None:
    lane = Lane(Shape(rate, delay))
    now, first = 0.0, None
    arrivals: list[float] = []
    carried_bits = 0
    for pause, num_bytes in offers:
        now += pause
        arrival = lane.offer(now, num_bytes)
        if arrival is None:
            continue
        first = now if first is None else first
        carried_bits += num_bytes * 8
        on_line = num_bytes * 8 / rate
        assert now + on_line + delay <= arrival + 1e-9
        assert arrival <= now + lane.max_queue_s + on_line + delay + 1e-9
        assert carried_bits <= (arrival - delay - first) * rate + 1e-3
        arrivals.append(arrival)
    assert all(one <= other for one, other in itertools.pairwise(arrivals))
