"""Lines, and several of them as one text."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from moeserve.cli.run.line_reader import Entry, LineReader
from tests.support.clients.terminal import Terminal
from tests.support.servers.server import clean_environment


def typed(*lines: str) -> tuple[Callable[[str], str], list[str]]:
    rest, prompts = list(lines), list[str]()

    def read(prompt: str) -> str:
        prompts.append(prompt)
        if not rest:
            raise EOFError
        return rest.pop(0)

    return read, prompts


def entries(*lines: str) -> list[Entry]:
    reader, found = LineReader([], typed(*lines)[0]), list[Entry]()
    while True:
        try:
            found.append(reader.read())
        except EOFError:
            return found


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (['"""a', "b", 'c"""'], "a\nb\nc"),
        (['"""', "a", "", "b", '"""'], "a\n\nb"),
        (['"""one line"""'], "one line"),
        # ollama/ollama#749: quotes behind the first words made a question of each line.
        (['Summarise this: """first', "second", 'third"""'], "Summarise this: first\nsecond\nthird"),
        # ollama/ollama#13824: an empty line within quotes ended them.
        (['"""a', "", "", 'b"""'], "a\n\n\nb"),
        # letta-ai/letta#122, ollama/ollama#2273: pasted lines come in one entry where the terminal marks them.
        (["def f():\n    return 1\n"], "def f():\n    return 1"),
        (['pasted """with\na docstring\n"""'], 'pasted """with\na docstring\n"""'),
    ],
)
def test_several_lines_are_one_entry(lines: Sequence[str], text: str) -> None:
    assert entries(*lines) == [Entry(text, False)]


def test_lines_are_entries_of_their_own() -> None:
    assert entries("one", "  two ", "") == [Entry("one", True), Entry("two", True), Entry("", True)]


def test_the_inputs_end_ends_a_text_first() -> None:
    assert entries('"""a', "b") == [Entry("a\nb", False)]


def test_within_quotes_there_is_no_prompt() -> None:
    """ollama/ollama#16257: its dots were copied with the text."""
    read, prompts = typed('"""a', 'b"""')
    LineReader([], read).read()
    assert prompts == [">>> ", ""]


def test_half_a_text_is_dropped_by_ctrl_c() -> None:
    lines: Iterator[str | type[BaseException]] = iter(['"""half', KeyboardInterrupt, "next"])

    def read(prompt: str) -> str:
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    reader = LineReader([], read)
    with pytest.raises(KeyboardInterrupt):
        reader.read()
    assert reader.read() == Entry("next", True)


READING = """
import sys
sys.modules["readline"] = None  # as in a Python without it; libedit does not mark pastes either
from moeserve.cli.run.line_reader import LineReader
reader = LineReader([], input)
while True:
    print("entry", repr(reader.read().text), flush=True)
"""


def test_pasted_lines_are_one_entry_where_nothing_marks_them() -> None:
    """The last of them has no end yet."""
    with Terminal([sys.executable, "-c", READING], clean_environment()) as terminal:
        terminal.wait_for(">>> ")
        terminal.send("def f():\n\n    return 1")
        time.sleep(0.2)
        terminal.send("\n")
        terminal.wait_for(r"entry 'def f():\n\n    return 1'")
        terminal.wait_for(">>> ")
        terminal.send("a line\n")
        terminal.wait_for("entry 'a line'")
