"""The one error that opening or reading a model's files raises, whatever their format."""

from __future__ import annotations

import re
from pathlib import Path

from moeserve.errors import UserError

MAX_PROBLEM_CHARS = 1000
MAX_NAME_CHARS = 120  # of what a file calls something: a word, or what stands in quotes
_LONG_NAME = re.compile(
    rf"""'[^']{{{MAX_NAME_CHARS},}}'|"[^"]{{{MAX_NAME_CHARS},}}"|\S{{{MAX_NAME_CHARS + 1},}}"""
)


class ModelError(UserError, ValueError):
    """Files that cannot be served: names the file, the key or tensor, the cause and the remedy.

    The text is meant for the user: what it quotes of the file is neither long nor a terminal's command.
    """

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {_quotable(problem)}")
        self.path = path


def _quotable(text: str) -> str:
    """Its beginning and its end, which has the remedy, where it is long; without control characters. The same of each
    name in it, so that a hostile one does not hide the rest."""
    text = _LONG_NAME.sub(lambda name: f"{name[0][: MAX_NAME_CHARS - 20]}...{name[0][-20:]}", text)
    if len(text) > MAX_PROBLEM_CHARS:
        half = MAX_PROBLEM_CHARS // 2
        text = f"{text[:half]} [...] {text[-half:]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
