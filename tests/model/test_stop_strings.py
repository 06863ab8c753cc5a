"""A text ends before its first stop, whatever pieces it came in, and no piece of a stop leaks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.stop_strings import StopStrings
from tests.model.text_strategies import cut_up, unhurried

ABC = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


def run(stops: list[str], deltas: list[str]) -> tuple[list[str], str | None]:
    """What was shown after each delta, and the stop that ended it."""
    stream = StopStrings(stops)
    shown = []
    for delta in deltas:
        text, matched = stream.push(delta)
        shown.append(text)
        if matched is not None:
            return shown, matched
    shown.append(stream.flush())
    return shown, None


def naive(stops: list[str], text: str) -> tuple[str, str | None]:
    """Read on a character at a time; end as soon as the text ends with a stop."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_a_stop_over_several_tokens_is_found_and_not_leaked() -> None:
    shown = run(["own fox"], ["The", " quick", " br", "own", " f", "ox", " jumps"])
    assert shown == (["The", " quick", " br", "", "", ""], "own fox")


def test_a_stop_begun_in_vain_is_shown_once_it_is_certain() -> None:
    assert run(["own fox"], ["br", "own", " f", "rog"]) == (["br", "", "", "own frog", ""], None)


def test_a_stop_split_into_single_characters_is_found() -> None:
    shown, matched = run(["DEFGHIJ"], list("ABCDEFGHIJKLM"))
    assert ("".join(shown), matched) == ("ABC", "DEFGHIJ")


def test_a_stop_inside_one_delta_is_found_and_what_follows_is_dropped() -> None:
    assert run(["DEFGHIJ"], ["ABCDEFGHIJKLM"]) == (["ABC"], "DEFGHIJ")


def test_a_text_that_ends_inside_a_stop_is_shown_whole() -> None:
    assert run(["DEFGHIJ"], ["ABCDEF"]) == (["ABC", "DEF"], None)


def test_only_what_could_become_a_stop_is_held_back() -> None:
    assert run(["aab"], ["aaaa"]) == (["aa", "aa"], None)


def test_the_first_stop_to_be_complete_counts() -> None:
    assert run(["world", "lo"], ["hello world"]) == (["hel"], "lo")


def test_of_stops_complete_at_once_the_longest_counts() -> None:
    assert run(["c", "abc", "bc"], ["xabc"]) == (["x"], "abc")


def test_a_stop_that_overlaps_itself_is_found_after_a_false_start() -> None:
    shown, matched = run(["abab!"], ["ababab", "!"])
    assert ("".join(shown), matched) == ("ab", "abab!")


def test_without_stops_nothing_is_held_back() -> None:
    assert run([], ["a", "b"]) == (["a", "b", ""], None)


def test_a_stop_of_several_code_points_is_found() -> None:
    family = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
    shown, matched = run([family], ["a", *family, "b"])
    assert ("".join(shown), matched) == ("a", family)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="a stop string is empty"):
        StopStrings(["a", ""])


@unhurried
@given(stops=STOPS, text=ABC, data=st.data())
def test_every_cut_of_a_text_ends_it_at_the_same_place(
    stops: list[str], text: str, data: st.DataObject
) -> None:
    shown, matched = run(stops, data.draw(cut_up(text)))
    assert ("".join(shown), matched) == naive(stops, text)


@unhurried
@given(stops=STOPS, text=ABC)
def test_what_is_shown_can_never_become_a_stop_and_the_rest_still_could(
    stops: list[str], text: str
) -> None:
    stream, shown, seen = StopStrings(stops), "", ""
    for character in text:
        delta, matched = stream.push(character)
        shown, seen = shown + delta, seen + character
        if matched is not None:
            return
        beginnings = [stop[:n] for stop in stops for n in range(len(stop))]
        longest = max((len(each) for each in beginnings if seen.endswith(each)), default=0)
        assert shown == seen[: len(seen) - longest]
