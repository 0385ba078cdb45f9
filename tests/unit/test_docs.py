"""What docs/ says of flags, endpoints and metrics is so, its links lead somewhere, and its pages keep their form."""

from __future__ import annotations

import dataclasses
import re
import runpy
import sys
from functools import cache
from pathlib import Path

import pytest

from moeserve.config import ServerConfig
from moeserve.httpserver.observability.metrics import Metrics

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
# Pages elsewhere that link to docs/ or from which docs/ is reached.
OTHER_PAGES = [REPOSITORY / name for name in ("README.md", "training/README.md", "tests/fixtures/README.md")]
KINDS = {"tutorial", "how-to", "reference", "explanation", "development", "results"}
MAX_LINES = 250  # of a page written by hand; a longer one is a folder of pages
# Pages whose flags are all of `moeserve serve`.
PAGES_OF_SERVE = (
    "tutorial/quickstart.md",
    "how-to/serve-a-model.md",
    "how-to/tune-for-load.md",
    "how-to/troubleshoot.md",
    "reference/startup-errors.md",
    "reference/http.md",
    "reference/logs-and-traces.md",
    "explanation/load.md",
)
MADE = "<!-- Made by scripts/generate_docs.py"

# Files whose text may name a page of docs/: code, its comments and messages, and what is deployed with it.
NAMING = (
    "*.py",
    "*.pyi",
    "*.cpp",
    "*.h",
    "*.inl",
    "*.sh",
    "*.env",
    "*.service",
    "*.yml",
    "*.yaml",
    "*.js",
    "*.html",
)
NAMED_FOLDERS = ("moeserve", "deploy", "scripts", "tests", "benchmarks", "training")


def title_of(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


@cache
def prose(page: Path) -> str:
    """Without code blocks."""
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    """Targets within the repository, "#anchor" included."""
    return re.findall(r"\]\((?!https?://)([^)\s]+)\)", prose(page))


@cache
def targets(page: Path) -> set[Path]:
    """Files that it links to."""
    return {(page.parent / link.partition("#")[0]).resolve() for link in links(page)}


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_generated_pages_are_what_the_code_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has imported most of the server already."""
    script = REPOSITORY / "scripts" / "generate_docs.py"
    monkeypatch.syspath_prepend(script.parent)
    monkeypatch.setattr(sys, "argv", [str(script), "--check"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0, capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES_OF_SERVE)
def test_no_flag_is_documented_that_is_not_there(page: str) -> None:
    flags = {"--" + option.name.replace("_", "-") for option in dataclasses.fields(ServerConfig)}
    documented = set(re.findall(r"--[a-z][a-z-]+", (DOCS / page).read_text()))
    assert documented - flags == set()


@cache
def exposed_metrics() -> set[str]:
    """Counters without their suffix."""
    exposition = Metrics("model").render()[0].decode()
    names = {name.removesuffix("_total") for name in re.findall(r"^# TYPE (\S+)", exposition, re.MULTILINE)}
    script = runpy.run_path(str(REPOSITORY / "scripts" / "front_metrics_reference.py"))
    return names | {family.name for family in script["front_families"]()}


def test_pages_name_metrics_that_there_are() -> None:
    """`name_*` stands for several."""
    named = {
        (title_of(page), name)
        for page in PAGES
        if page.parent.name != "results"
        for name in re.findall(r"`((?:moeserve|vllm):\w+)", page.read_text())
    }
    assert len({page for page, _ in named}) > 5
    for page, name in named:
        stem = re.sub(r"_(total|bucket|sum|count)$", "", name)
        whole = stem in exposed_metrics()
        assert whole or (name.endswith("_") and any(one.startswith(name) for one in exposed_metrics())), page


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=title_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), link
        if anchor:
            assert anchor in anchors(path), f"{link}: no such heading"


def test_pages_that_the_code_names_are_there() -> None:
    files = [
        file for folder in NAMED_FOLDERS for kind in NAMING for file in (REPOSITORY / folder).rglob(kind)
    ]
    named = {
        (str(file.relative_to(REPOSITORY)), page)
        for file in [*files, REPOSITORY / "Makefile"]
        for page in re.findall(r"(?<![\w/.-])docs/[\w./-]+\.md", file.read_text())
    }
    assert len(named) > 10, "the reader sees none"
    assert [one for one in sorted(named) if not (REPOSITORY / one[1]).is_file()] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page != DOCS / "README.md"], ids=title_of)
def test_every_page_has_a_kind_and_stands_in_an_index(page: Path) -> None:
    """An index is the README.md of the page's folder, or of a folder around it."""
    folder = page.parent
    assert page.relative_to(DOCS).parts[0] in KINDS
    indices = [parent / "README.md" for parent in (folder, *folder.parents) if parent.is_relative_to(DOCS)]
    listed = set().union(*(targets(index) for index in indices if index.exists() and index != page))
    assert page.resolve() in listed, "no README.md links to it"


@pytest.mark.parametrize("page", PAGES, ids=title_of)
def test_pages_have_one_title_and_an_end(page: Path) -> None:
    assert len(re.findall(r"^# ", prose(page), re.MULTILINE)) == 1
    if MADE not in page.read_text() and page.parent.name != "results":
        assert len(page.read_text().splitlines()) <= MAX_LINES, "make it a folder of pages"


def test_results_are_a_page_for_each_subject() -> None:
    """At most fourteen pages; each section begins with its date, its machine and its command."""
    pages = [page for page in (DOCS / "results").iterdir() if page.name != "README.md"]
    assert 8 <= len(pages) <= 14
    for page in pages:
        _, *sections = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)
        assert sections, page.name
        for section in sections:
            heading, _, text = section.partition("\n\n")
            begin = re.match(r"\*([^*]|`[^`]*`)+\*\n", text)
            assert begin is not None, f"{page.name}: {heading}"
            assert re.search(
                r"\b(January|February|March|April|May|June|July|August|September|October|November|December)"
                r" \d{4}\.",
                begin[0],
            ), f"{page.name}: {heading}: no date"


def test_programs_that_pages_name_are_there() -> None:
    """`python -m …` of this repository, wherever a page or an issue's form says it."""
    pages = [*PAGES, *OTHER_PAGES, REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / ".github").glob("*.md")]
    named = {
        (title_of(page), name)
        for page in [*pages, *(REPOSITORY / "benchmarks").rglob("*.md")]
        for name in re.findall(r"\b((?:benchmarks|training|tests)(?:\.\w+)+)\b", page.read_text())
        if not name.endswith((".py", ".md", ".json"))
    }
    assert len(named) > 20
    for page, name in sorted(named):
        assert (REPOSITORY / name.replace(".", "/")).with_suffix(".py").is_file(), f"{page}: {name}"


def test_code_that_pages_name_is_there() -> None:
    """Files, and attributes of classes."""
    sources = [file for kind in NAMING for file in (REPOSITORY / "moeserve").rglob(kind)]
    files = {
        file.name for folder in NAMED_FOLDERS for kind in NAMING for file in (REPOSITORY / folder).rglob(kind)
    }
    words = {word for file in sources for word in re.findall(r"\w+", file.read_text())}
    named: dict[str, list[str]] = {}
    for page in [*(DOCS / "explanation").glob("*.md"), *(DOCS / "development").glob("*.md")]:
        text = page.read_text()
        named[page.name] = re.findall(r"`[\w/]*?(\w+\.(?:py|h|cpp|inl|js))`", text)
        assert set(named[page.name]) <= files, page.name
        attributes = re.findall(r"`([A-Z]\w*)\.(\w+)`", text)
        assert {word for pair in attributes for word in pair} <= words, page.name
    assert sum(map(len, named.values())) > 50


def test_tests_that_pages_name_are_there() -> None:
    """A promise of security.md is as good as its test."""
    files = [*(REPOSITORY / "tests").rglob("test_*.py")]
    there = {path.stem for path in files}
    for path in files:
        there |= set(re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", page.read_text())}
    assert len(named) > 50
    assert named <= there
