"""One concept has one word: the glossary's forbidden synonyms do not come back in docstrings, help and messages, and a
docstring begins with what a thing is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
GLOSSARY = REPOSITORY / "docs" / "development" / "glossary.md"
PACKAGE = REPOSITORY / "moeserve"
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| ([^|]*) \|$", re.MULTILINE)
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
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def docstrings() -> Iterator[tuple[str, str]]:
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text is not None:
                    yield f"{path.relative_to(REPOSITORY)}:{getattr(node, 'lineno', 1)}", text


def texts() -> Iterator[tuple[str, str]]:
    """Docstrings, help and messages: the strings with a space in them."""
    for path, tree in trees().items():
        for node in ast.walk(tree):
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
    for place, text in texts():
        line = " ".join(text.split())
        lower = line.lower()
        if any(synonym in lower for synonym in synonyms):  # quicker than the search
            found += [
                f"{place}: {match[1]!r}, where the glossary has {synonyms[match[1].lower()]!r}"
                for match in one.finditer(line)
            ]
    assert not found, "\n".join(found)


def test_a_docstring_begins_with_what_a_thing_is() -> None:
    found = [f"{place}: {text[:60]}" for place, text in docstrings() if text.startswith("Of ")]
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
