"""Commands in the results pages name programs, tests and targets that exist: each figure can be measured again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from moeserve.cli.main import COMMANDS

REPOSITORY = Path(__file__).resolve().parents[2]
MAKEFILE = (REPOSITORY / "Makefile").read_text()
_CODE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
_RUN = re.compile(r"(?:[A-Z_]+=\S+ )*(?:python -m |(?=(?:pytest|moeserve|make)(?: |$)))(\S+) ?(.*)")


def commands() -> Iterator[tuple[str, str, str]]:
    """Yields page, program and arguments of each command between backticks."""
    for page in sorted((REPOSITORY / "docs" / "results").glob("*.md")):
        for code in _CODE.findall(page.read_text()):
            if (found := _RUN.fullmatch(" ".join(code.split()))) is not None:
                yield page.name, found[1], found[2]


ALL = sorted(set(commands()))


def exists(program: str, arguments: str) -> bool:
    words = arguments.split()
    if program == "make":
        return all(re.search(rf"^{re.escape(word)}\b.*:", MAKEFILE, re.MULTILINE) for word in words[:1])
    if program == "moeserve":
        return not words or words[0].startswith("-") or words[0] in COMMANDS
    if program == "pytest":
        tests = [word.partition("::")[0] for word in words if word.startswith("tests")]
        return all(any(REPOSITORY.glob(test)) for test in tests)
    module = REPOSITORY / program.replace(".", "/")
    return module.with_suffix(".py").exists() or (module / "__main__.py").exists()


@pytest.mark.parametrize(("page", "program", "arguments"), ALL, ids=lambda value: value[:60])
def test_the_program_is_there(page: str, program: str, arguments: str) -> None:
    assert exists(program, arguments), page


def test_most_commands_are_seen() -> None:
    assert len(ALL) > 80
    assert not exists("benchmarks.nothing", "")
    assert not exists("pytest", "tests/unit/test_nothing.py")
    assert not exists("moeserve", "nothing")
