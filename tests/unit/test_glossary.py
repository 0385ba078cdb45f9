"""One concept has one word: the glossary's forbidden synonyms do not come back in docstrings, help and messages, and a
docstring begins with what a thing is, in tests, benchmarks and scripts, too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
GLOSSARY = REPOSITORY / "docs" / "development" / "glossary.md"
PACKAGE = REPOSITORY / "moeserve"
# Folders whose docstrings begin with what a thing is.
FOLDERS = ("moeserve", "tests", "benchmarks", "scripts", "training")
# Where a docstring begins with "Of".
BEGINS_WITH_OF = re.compile(r'^[ \t]*[rR]?"""\s*Of\b.*', re.MULTILINE)
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| ([^|]*) \|$", re.MULTILINE)
# Between two pieces of one string.
PIECES = re.compile(r"""["']\s*\n\s*[rRfFbB]*["']""")
# Phrases that hide of what or of whom a sentence speaks.
VAGUE = ("so many", "nobody")
MOST_VAGUE = 10  # lines


def terms() -> dict[str, list[str]]:
    """The forbidden synonyms of each word."""
    rows = ROW.findall(GLOSSARY.read_text())
    return {
        word: [synonym for synonym in map(str.strip, synonyms.split(",")) if synonym]
        for word, _, synonyms in rows
        if word != "word" and not word.startswith("-")
    }


@cache
def sources() -> dict[Path, str]:
    return {
        path: path.read_text() for folder in FOLDERS for path in sorted((REPOSITORY / folder).rglob("*.py"))
    }


def may_have(words: Iterable[str]) -> Iterator[tuple[Path, str]]:
    """The package's files in which one of the words stands, strings in several pieces joined. Parsing all is slow."""
    for path, source in sources().items():
        if path.is_relative_to(PACKAGE):
            text = " ".join(PIECES.sub("", source).split()).lower()
            if any(word in text for word in words):
                yield path, source


def texts(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Docstrings, help and messages in files that may have one of the words: the strings with a space in them."""
    for path, source in may_have(words):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                yield f"{path.relative_to(REPOSITORY)}:{node.lineno}", node.value


def test_there_are_forty_terms_and_no_synonym_is_a_term() -> None:
    found = terms()
    assert len(found) >= 40
    synonyms = [synonym for of_word in found.values() for synonym in of_word]
    assert len(synonyms) == len(set(synonyms))
    assert not set(synonyms) & set(found)


def test_no_forbidden_synonym_comes_back() -> None:
    synonyms = {synonym: word for word, of_word in terms().items() for synonym in of_word if " " in synonym}
    one = re.compile(
        r"\b(" + "|".join(map(re.escape, sorted(synonyms, key=len, reverse=True))) + r")s?\b", re.IGNORECASE
    )
    found = []
    for place, text in texts(synonyms):
        line = " ".join(text.split())
        lower = line.lower()
        if any(synonym in lower for synonym in synonyms):  # quicker than the search
            found += [
                f"{place}: {match[1]!r}, where the glossary has {synonyms[match[1].lower()]!r}"
                for match in one.finditer(line)
            ]
    assert not found, "\n".join(found)


def test_a_docstring_begins_with_what_a_thing_is() -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}: {match[0].strip()[:60]}"
        for path, source in sources().items()
        for match in BEGINS_WITH_OF.finditer(source)
    ]
    assert not found, "\n".join(found)


def test_few_sentences_hide_their_subject() -> None:
    vague = re.compile("|".join(VAGUE), re.IGNORECASE)
    lines = [
        f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()}"
        for kind in ("*.py", "*.pyi", "*.h", "*.cpp", "*.inl")
        for path in PACKAGE.rglob(kind)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if vague.search(line)
    ]
    assert len(lines) <= MOST_VAGUE, "\n".join(lines)
