"""docs/reference/startup-errors.md has the errors that can end a start, in the code's words, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.rules.startup_errors import HOLE, REMEDIED, texts

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "startup-errors.md").read_text()
# Composed from a process's name and what the system says of its end, or printed without an exception.
COMPOSED = {
    "worker died while starting: signal 9, Killed; out of memory?",
    "worker died while starting: signal 9, Killed; memory ran out",
    "worker died while starting: signal 9, Killed; memory ran out, and a control group limits the server to … GiB",
    "… died while starting: exit code 4: a module could not be imported, as the lines above say",
    "… died while starting: the … process does not answer, because it was stopped; killed",
    "… died while starting: the … process has done nothing for 120 s; killed",
    "the process for … ended at once (exit code …): its own lines say why",
    "the process for … did not start within … s and was stopped",
    "the working directory has been deleted; start from another",
    "…: … answered with status …; …",
    "this CPU has no …, for which NumPy and PyTorch are compiled; in a virtual machine choose the CPU type host, else "
    "use another machine",
}


def listed() -> list[str]:
    rows = re.findall(r"^\| (`.*`) \| ", PAGE, re.MULTILINE)
    return [text for row in rows for text in re.findall(r"`([^`]+)`", row)]


# A verb that stands with what to use instead, a flag, or what a hole says.
REMEDY = re.compile(
    r"; .*(?:\b(?:check|choose|convert|download|give|leave|lower|move|name|put|raise|say|start|try|use|write)\b"
    rf"|--\w|{HOLE}$)"
)


def says_what_to_do(text: str) -> bool:
    """Behind a semicolon, as our messages do: such a one may do without a row. "Correct it" says nothing."""
    return REMEDY.search(text) is not None


def test_every_start_up_error_is_explained() -> None:
    unlisted = set(texts()) - set(texts(REMEDIED)) - set(listed())
    missing = {text for text in unlisted if not says_what_to_do(text)}
    assert not missing, "docs/reference/startup-errors.md needs rows for:\n" + "\n".join(sorted(missing))


def test_no_error_is_explained_that_is_not_there() -> None:
    assert set(listed()) - set(texts()) == COMPOSED
    assert len(listed()) == len(set(listed()))


def test_a_semicolon_alone_is_no_remedy() -> None:
    assert says_what_to_do("…: … is too large; lower it")
    assert says_what_to_do("no chat template; it has none: --chat-template takes a file")
    assert not says_what_to_do("the pattern is not valid: …; correct this regular expression")
    assert not says_what_to_do("lower … is missing; it is broken")


def test_the_reader_sees_all_ways_of_writing_a_text() -> None:
    found = set(texts())
    assert "port … of … is in use: choose another with …" in found  # an f-string
    assert "the folder holds no .gguf file" in found  # a constant
    assert any(text.endswith("it is private") for text in found)  # joined pieces
    assert all(HOLE * 2 not in text for text in found)
