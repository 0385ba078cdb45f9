"""The shell commands in the fenced blocks of the documentation's pages."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
_BLOCK = re.compile(r"^( *)```(sh|bash|console)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_SUBSTITUTION = re.compile(r"\$\([^()]*\)")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_KEYWORDS = ("do", "then", "else", "export", "exec", "sudo")
_SEPARATORS = frozenset(("|", "||", "&&", ";", "&"))


@dataclass(frozen=True)
class PageCommand:
    """One command of a page."""

    page: str  # relative to the repository
    words: tuple[str, ...]  # the program first; without redirections, assignments and what it is piped to
    text: str  # the whole line or lines, as a shell runs them

    @property
    def program(self) -> str:
        return self.words[0].removeprefix(".venv/bin/")


def pages() -> list[Path]:
    """The pages that tell a reader what to run. Results say what was run at their time."""
    docs = [page for page in (REPOSITORY / "docs").rglob("*.md") if "results" not in page.parts]
    return [*sorted(docs), REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"]


def commands() -> list[PageCommand]:
    """All commands of all pages. Raises ValueError for a block that a shell could not read."""
    return [
        command
        for page in pages()
        for command in commands_of(page.read_text(), str(page.relative_to(REPOSITORY)))
    ]


def commands_of(text: str, page: str = "") -> Iterator[PageCommand]:
    for indent, language, block in _BLOCK.findall(text):
        lines = [line.removeprefix(indent) for line in block.splitlines()]
        if language == "console":  # the program's output stands beside the commands
            lines = [
                line.removeprefix("$ ")
                for before, line in zip(["", *lines], lines, strict=False)
                if line.startswith("$ ") or before.endswith("\\")
            ]
        for whole in _whole_lines(lines, page):
            for words in _commands_in(whole):
                yield PageCommand(page, tuple(words), whole)


def _whole_lines(lines: list[str], page: str) -> Iterator[str]:
    """Joins lines that end with a backslash, or within quotes."""
    held = ""
    for line in lines:
        held += line
        if held.endswith("\\"):
            held = held[:-1]
            continue
        try:
            is_empty = not _tokens(held)
        except ValueError:  # a quotation goes on in the next line
            held += "\n"
            continue
        if not is_empty:
            yield held
        held = ""
    if held:
        raise ValueError(f"{page}: a quotation or a line does not end: {held}")


def _tokens(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    return list(lexer)


def _commands_in(line: str) -> Iterator[list[str]]:
    words: list[str] = []
    is_target = False  # of a redirection
    for token in [*_tokens(_SUBSTITUTION.sub("1", line)), ";"]:
        if token in _SEPARATORS:
            while words and (words[0] in _KEYWORDS or _ASSIGNMENT.fullmatch(words[0])):
                words.pop(0)
            if words and words[0] not in ("for", "done"):
                yield words
            words = []
        elif is_target:
            is_target = False
        elif set(token) <= set("<>&|"):
            is_target = True
        else:
            words.append(token)
