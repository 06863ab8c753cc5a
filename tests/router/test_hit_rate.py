"""The identity holds for every request: what was not delivered was lost for a reason."""

import random
import statistics
import time

from hypothesis import given
from hypothesis import strategies as st

from engine.clock import ManualClock
from router.hit_rate import HitRate, Loss, account, total
from router.news import News
from router.sightings import Sightings

tokens = st.integers(0, 5000)


def test_each_gap_has_its_reason() -> None:
    rate = account(
        prompt=1000,
        oracle=800,
        available=500,
        captured=400,
        promised=350,
        delivered=300,
        gone=[(Loss.EPOCH, 100), (Loss.LAG, 50), (Loss.EVICTED, 16)],
    )
    assert rate.lost == {
        Loss.NEW: 200,
        Loss.EPOCH: 100,
        Loss.LAG: 50,
        Loss.EVICTED: 150,
        Loss.LOAD: 100,
        Loss.PAIR: 50,
        Loss.STALE: 50,
    }


def test_a_worker_that_held_more_than_the_index_knew_raises_the_numbers_above() -> None:
    rate = account(prompt=100, oracle=0, available=0, captured=0, promised=0, delivered=64)
    assert rate.chain() == (100, 64, 64, 64, 64, 64)
    assert rate.lost == {Loss.NEW: 36}


def test_what_was_fetched_is_no_hit_and_no_loss_wherever_it_was_held() -> None:
    """It follows what was delivered; 200 tokens reach into what only another worker held."""

    def numbers(fetched: int) -> HitRate:
        return account(
            prompt=1000,
            oracle=800,
            available=500,
            captured=400,
            promised=350,
            delivered=300,
            fetched=fetched,
        )

    for fetched, lost in (
        (30, {Loss.LOAD: 100, Loss.PAIR: 50, Loss.STALE: 20}),
        (80, {Loss.LOAD: 100, Loss.PAIR: 20}),
        (150, {Loss.LOAD: 50}),
        (200, {}),
    ):
        rate = numbers(fetched)
        assert rate.chain() == (1000, 800, 500, 400, 350, 300)
        assert (rate.fetched, rate.spared) == (fetched, 300 + fetched)
        assert rate.lost == {Loss.NEW: 200, Loss.EVICTED: 300, **lost}
    more = numbers(260)
    assert (more.available, more.lost) == (560, {Loss.NEW: 200, Loss.EVICTED: 240})


@given(
    prompt=tokens,
    seen=st.lists(tokens, min_size=4, max_size=4),
    delivered=tokens,
    fetched=tokens,
    gone=st.lists(st.tuples(st.sampled_from(Loss), st.integers(0, 900)), max_size=6),
    anybodys=tokens,
)
def test_the_numbers_only_shrink_and_add_up_whatever_was_seen(
    prompt: int,
    seen: list[int],
    delivered: int,
    fetched: int,
    gone: list[tuple[Loss, int]],
    anybodys: int,
) -> None:
    delivered = min(delivered, prompt)
    oracle, available, captured, promised = seen
    rate = account(
        prompt=prompt,
        oracle=oracle,
        available=available,
        captured=captured,
        promised=promised,
        delivered=delivered,
        fetched=min(fetched, prompt - delivered),
        gone=gone,
        anybodys=anybodys,
    )
    rate.check()
    twice = total([rate, rate])
    twice.check()
    assert twice.prompt == 2 * prompt and total([]) == HitRate()


def told(clock: ManualClock) -> News:
    """Within a second."""
    return News(clock, lambda _instance, _name: True, slack_s=1.0)


def test_what_was_seen_is_gone_for_a_reason() -> None:
    clock = ManualClock()
    sightings = Sightings(clock, told(clock))
    names = [bytes([number]) * 16 for number in range(4)]

    def why(*live: str) -> list[Loss]:
        return [loss for loss, _ in sightings.gone(names[:1], 16, lambda each: each in live)]

    assert sightings.depth(names) == 0
    sightings.note(names[:3], "w/1")
    assert sightings.depth(names) == 3
    assert why("w/1") == [Loss.LAG]
    sightings.settle(names[:3], "w/1")
    clock.advance(0.5)
    assert why("w/1") == [Loss.LAG]
    clock.advance(0.5)
    assert why("w/1") == [Loss.EVICTED]
    assert why("w/2") == [Loss.EPOCH]


def test_a_prompt_is_settled_by_itself_though_it_shares_its_beginning() -> None:
    clock = ManualClock()
    sightings = Sightings(clock, told(clock))
    names = [bytes([number]) * 16 for number in range(4)]
    sightings.note(names[:2], "w")
    sightings.note(names, "w")
    sightings.settle(names[:2], "w")
    clock.advance(2.0)
    assert sightings.gone(names, 16, lambda _: True) == [(Loss.LAG, 64)]
    sightings.settle(names, "w")
    clock.advance(2.0)
    assert sightings.gone(names, 16, lambda _: True) == [(Loss.EVICTED, 64)]


def test_what_was_just_sent_to_a_worker_is_expected_there_until_its_news_should_have_come() -> None:
    clock = ManualClock()
    sightings = Sightings(clock, told(clock))
    names = [bytes([number]) * 16 for number in range(6)]
    sightings.note(names[:4], "w/1")
    assert sightings.expected(names) == {"w/1": 4}
    sightings.note(names[:2], "w/2")  # they begin alike
    assert sightings.expected(names) == {"w/1": 4, "w/2": 2}
    assert sightings.expected(names[:2]) == {"w/2": 2}
    sightings.settle(names[:4], "w/1")
    clock.advance(0.9)
    assert sightings.expected(names) == {"w/1": 4, "w/2": 2}
    clock.advance(0.2)
    assert sightings.expected(names) == {"w/2": 2}
    sightings.drop(names[:2], "w/2")  # it failed
    assert sightings.expected(names) == {}
    assert sightings.gone(names[:1], 16, lambda _: True) == [(Loss.EVICTED, 16)]


def test_while_news_are_late_a_worker_is_expected_to_hold_what_its_pool_can() -> None:
    """Of twelve blocks, and prompts of four; the last one shares two with the one before."""
    clock = ManualClock()
    news = News(clock, lambda _instance, _name: False, slack_s=1.0)
    sightings = Sightings(clock, news)
    sightings.opened("w/1", 12)
    prompts = [[bytes([number, at]) * 8 for at in range(4)] for number in range(4)]
    for names in prompts[:3]:
        sightings.note(names, "w/1")
        sightings.settle(names, "w/1")
        clock.advance(60.0)
    assert [sightings.expected(names) for names in prompts[:3]] == [{"w/1": 4}] * 3
    longer = prompts[2][:2] + prompts[3][:2]
    sightings.note(longer, "w/1", num_held=2)
    sightings.settle(longer, "w/1")
    assert [sightings.expected(names) for names in prompts[:2]] == [{}, {"w/1": 4}]
    sightings.others_computed("w/1", 1)  # as long as ours in the mean: three blocks
    assert sightings.expected(prompts[1]) == {}
    assert sightings.expected(longer) == {"w/1": 4}


def test_only_so_many_names_are_remembered_and_the_latest_stay() -> None:
    sightings = Sightings(ManualClock(), max_names=6)
    names = [bytes([number]) for number in range(9)]
    sightings.note(names[:3], "w")
    sightings.note(names[3:5], "w")
    sightings.note(names[:1], "w")
    sightings.note(names[5:8], "w")
    assert len(sightings) == 6
    assert [sightings.depth([name]) for name in names] == [1, 0, 0, 1, 1, 1, 1, 1, 0]


def test_a_long_prompt_is_noted_and_settled_in_a_fraction_of_a_millisecond() -> None:
    """8,192 tokens, a million names known."""
    clock, rng = ManualClock(), random.Random(1)
    sightings = Sightings(clock, max_names=1_000_000)
    for _ in range(500):
        sightings.note([rng.randbytes(16) for _ in range(1000)], "w")
    took = []
    for _ in range(50):
        names = [rng.randbytes(16) for _ in range(512)]
        began = time.perf_counter()
        sightings.note(names, "w")
        sightings.settle(names, "w")
        took.append(time.perf_counter() - began)
    assert statistics.median(took) < 0.0005
