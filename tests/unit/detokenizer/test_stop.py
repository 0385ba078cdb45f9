"""Stop strings: the same outcome however tokens cut the text, nothing leaked, nothing held without need."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moeserve.detokenizer.stop import StopFinder

# Few letters, so that stop strings overlap themselves and one another.
LETTERS = st.text(alphabet="abc", max_size=40)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=6), max_size=4)


def whole_text_reference(
    text: str, stops: list[str], include_stop: bool, first_end: int = 1
) -> tuple[str, str | None]:
    """The definition, on the whole text at once: the stop string that ends first, after at least `first_end`
    characters; of those, the longest."""
    for end in range(first_end, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return (text[:end] if include_stop else text[: end - len(stop)]), stop
    return text, None


def cut(text: str, borders: list[int]) -> list[str]:
    edges = [0, *sorted(border % (len(text) + 1) for border in borders), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@given(LETTERS, STOPS, st.lists(st.integers(0, 1000), max_size=12), st.booleans())
@example("abab", ["ababc", "ba"], [1, 2, 3], False)
@example("aaab", ["aab"], [1, 2, 3], True)
def test_any_cut_gives_what_the_whole_text_gives(
    text: str, stops: list[str], borders: list[int], include_stop: bool
) -> None:
    expected, expected_stop = whole_text_reference(text, stops, include_stop)
    finder = StopFinder(stops, include_stop)
    shown, seen = "", ""
    for piece in cut(text, borders):
        shown += finder.push(piece)
        seen += piece
        assert expected.startswith(shown), "text beyond the match was shown"
        if finder.hit is not None:
            break
        held = seen[len(shown) :]
        assert seen == shown + held
        longest = max(
            (n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])),
            default=0,
        )
        assert len(held) == longest, "held more, or less, than the longest beginning of a stop string"
    if finder.hit is None:
        shown += finder.flush()
    assert (shown, finder.hit) == (expected, expected_stop)


@given(LETTERS, STOPS, st.integers(0, 10), st.booleans())
@example("abab", ["ab", "bab"], 3, False)
@example("aaaa", ["aa"], 3, False)
def test_what_is_complete_too_early_is_text(
    text: str, stops: list[str], early: int, include_stop: bool
) -> None:
    """Character by character, as tokens; a stop string that began early may still be completed in time."""
    finder = StopFinder(stops, include_stop)
    shown = ""
    for position, char in enumerate(text):
        shown += finder.push(char, may_hit=position >= early)
        if finder.hit is not None:
            break
    else:
        shown += finder.flush()
    assert (shown, finder.hit) == whole_text_reference(text, stops, include_stop, early + 1)


def test_stop_string_across_pieces_never_shows() -> None:
    finder = StopFinder(["</answer>"], include_stop=False)
    assert [finder.push(piece) for piece in ("yes<", "/ans", "wer", "> more")] == ["yes", "", "", ""]
    assert finder.hit == "</answer>"


def test_false_start_is_released_at_once() -> None:
    finder = StopFinder(["</answer>"], include_stop=False)
    assert [finder.push(piece) for piece in ("a</ans", "</", "b")] == ["a", "</ans", "</b"]


def test_self_overlapping_stop_string_is_found() -> None:
    finder = StopFinder(["aab"], include_stop=False)
    assert finder.push("aaa") + finder.push("b!") == "a"
    assert finder.hit == "aab"


def test_longest_of_two_that_end_together() -> None:
    finder = StopFinder(["b", "ab"], include_stop=False)
    assert finder.push("xab") == "x"
    assert finder.hit == "ab"


def test_repetitive_stop_string_takes_linear_time() -> None:
    """A client may send 10,000 times "a": re-scanning for each character would take minutes."""
    finder = StopFinder(["a" * 10_000 + "b"], include_stop=False)
    shown = "".join(finder.push("a" * 10 + "c" * (i % 500 == 0)) for i in range(20_000))
    assert finder.hit is None
    assert len(shown + finder.flush()) == 20_000 * 10 + 40


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopFinder([""], include_stop=False)
