"""How late the index's news are, as seen from what it tells of prompts that were computed."""

from engine.clock import ManualClock
from router.news import MOST_LATE_S, NEXT_FEW, News


class Index:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.told: set[tuple[str, bytes]] = set()
        self.gone: set[str] = set()
        self.news = News(self.clock, self.tells, slack_s=1.0)

    def tells(self, instance: str, name: bytes) -> bool | None:
        return None if instance in self.gone else (instance, name) in self.told

    def tell(self, instance: str, name: bytes) -> None:
        self.told.add((instance, name))
        self.news.listen()


def test_news_are_awaited_from_computing_until_the_index_tells_them() -> None:
    index = Index()
    news, clock = index.news, index.clock
    news.computed("a", b"1")
    clock.advance(30)
    news.computed("b", b"2")
    clock.advance(30)
    assert (news.late_s, news.have_come(0.0), news.have_come(-1.0)) == (60, False, True)
    index.tell("a", b"1")
    assert (news.late_s, news.have_come(29.1), news.have_come(29.0)) == (30, False, True)
    index.tell("b", b"2")
    assert news.late_s == 0
    assert (news.have_come(clock.now() - 0.9), news.have_come(clock.now() - 1)) == (False, True)


def test_what_is_never_told_is_given_up_when_later_news_come() -> None:
    """Evicted before anybody heard of it, or of a worker that is no more."""
    index = Index()
    for at in range(NEXT_FEW):
        index.news.computed("a", bytes([at]))
        index.clock.advance(1)
    index.tell("a", bytes([NEXT_FEW - 1]))
    assert index.news.late_s == 0
    index.news.computed("a", b"lost")
    index.clock.advance(5)
    index.gone.add("a")
    index.news.listen()
    assert index.news.late_s == 0
    index.news.computed("b", b"lost, too")
    index.clock.advance(MOST_LATE_S + 1)
    index.news.listen()
    assert index.news.late_s == 0


def test_what_the_index_tells_already_says_nothing_about_the_time() -> None:
    """It held the block before, and has not heard yet that it was evicted."""
    index = Index()
    index.told.add(("a", b"1"))
    index.news.computed("a", b"1")
    index.clock.advance(5)
    assert index.news.late_s == 0
