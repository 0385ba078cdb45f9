"""What a terminal would obey is taken out of texts, however they are cut into pieces."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.cli.run.terminal_text import MOST_LINE_CHARS, TerminalFilter, safe_line, safe_text

OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\nof two lines", "plain\ttext\nof two lines"),
        ("a\x1b[31mred\x1b[0m", "ared"),
        ("\x1b[2J\x1b[1;1H", ""),
        ("\x1b[?2004h\x1b[>4;2m", ""),
        ("a\x1b]0;title\ab", "ab"),
        ("a\x1b]52;c;cm0gLXJmIH4=\x1b\\b", "ab"),
        ("\x1b]8;;https://evil.example\x1b\\here\x1b]8;;\x1b\\", "here"),
        ("a\x9b31mb\x9d0;t\x9cc", "abc"),
        ("a\x1bPq#0;2;0;0;0#0~~@@vv\x1b\\b", "ab"),
        ("a\x1b_payload\x1b\\b\x1b^private\x1b\\c\x1bXsos\x1b\\d", "abcd"),
        ("a\x1bcb\x1b(0c\x1b#8d\x1b7e", "abcde"),
        ("a\x1b\x1b[31mb", "ab"),
        ("a\x1b[3\x1b[31mb", "ab"),
        ("hidden\rshown", "hiddenshown"),
        ("windows\r\nlines", "windows\nlines"),
        ("abc\b\b\bxyz\x7f", "abcxyz"),
        ("bell\a\x00", "bell"),
        ("a\u202eevil\u202c\u2066b\u2069", "aevilb"),
        ("half \ud83d, whole 😀", "half \ufffd, whole 😀"),
        ("日本語 العربية עברית 👩‍👩‍👧 é", "日本語 العربية עברית 👩‍👩‍👧 é"),
        ("an unclosed \x1b]0;title\nends with its line", "an unclosed \nends with its line"),
        ("\x1b", ""),
        ("\x1b[", ""),
        ("written out: \\x1b[31m and ^[[31m", "written out: \\x1b[31m and ^[[31m"),
    ],
)
def test_what_is_shown(text: str, shown: str) -> None:
    assert safe_text(text) == shown
    one_by_one = TerminalFilter()
    assert "".join(map(one_by_one.take, text)) == shown


PIECES = st.lists(
    st.text(st.sampled_from("\x1b\x9b\x9d\x90\x9c\a\\[]P_^X;?0m12 ab\n\r\t\u202e\ud800é日"), max_size=12),
    max_size=8,
)


@given(PIECES)
def test_nothing_that_is_obeyed_is_left_whatever_the_pieces(pieces: list[str]) -> None:
    in_pieces = TerminalFilter()
    shown = "".join(map(in_pieces.take, pieces))
    assert shown == safe_text("".join(pieces))
    assert not OBEYED.search(shown)


def test_a_line_is_one_and_short() -> None:
    assert safe_line("a name\x1b[2J\nof  two\tlines ") == "a name of two lines"
    assert len(safe_line("x" * 10_000)) == MOST_LINE_CHARS + 3
