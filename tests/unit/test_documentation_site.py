"""The documentation as a site: each page has its place, outer links become paths, and mkdocs warns of nothing."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
SITE = runpy.run_path(str(REPOSITORY / "scripts" / "documentation_site.py"))
KINDS = ["Tutorial", "How-to", "Reference", "Explanation", "Development", "Results"]

navigation: Callable[..., list[Any]] = SITE["navigation"]
pages_in: Callable[[list[Any]], Iterable[str]] = SITE["pages_in"]
without_outer_links: Callable[[str, str], str] = SITE["without_outer_links"]


def test_every_page_has_one_place_in_the_navigation() -> None:
    entries = navigation()
    assert [kind for entry in entries[1:] for kind in entry] == KINDS
    placed = list(pages_in(entries))
    assert sorted(placed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_a_page_that_the_index_does_not_have_is_missed(tmp_path: Path) -> None:
    (tmp_path / "reference").mkdir()
    for name in ("listed", "forgotten"):
        (tmp_path / "reference" / f"{name}.md").write_text(f"# {name}\n")
    (tmp_path / "README.md").write_text(
        "# Index\n\n## Reference\n\n- [listed](reference/listed.md): is here\n"
    )
    assert navigation(tmp_path) == ["README.md", {"Reference": ["reference/listed.md"]}]


def test_links_that_leave_the_documentation_are_paths() -> None:
    for given, shown in (
        ("[a](../../deploy/systemd/moeserve.service)", "a (`deploy/systemd/moeserve.service`)"),
        ("[moeserve.service](../../deploy/systemd/moeserve.service)", "`deploy/systemd/moeserve.service`"),
        ("[a](../reference/flags.md#x) [b](#c) [d](https://example.org)", None),
        ("![a](../images/chat.png)", None),
        ("```\n[a](../../deploy)\n```", None),
    ):
        assert without_outer_links(given, "how-to/page.md") == (given if shown is None else shown)


def mkdocs() -> str:
    """The program, from `make site`'s environment or the PATH; without one the test is skipped."""
    installed = REPOSITORY / "build" / "site-tools" / "bin" / "mkdocs"
    found = str(installed) if installed.is_file() else shutil.which("mkdocs")
    if found is None:
        pytest.skip("mkdocs is not installed (make site installs it)")
    return found


def test_mkdocs_builds_the_site_without_a_warning(tmp_path: Path) -> None:
    config = (REPOSITORY / "mkdocs.yml").read_text()
    assert yaml.safe_load(config.split("theme:")[0])["strict"] is True

    def build(*flags: str) -> subprocess.CompletedProcess[str]:
        command = [mkdocs(), "build", "--site-dir", str(tmp_path / "site"), *flags]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)

    built = build()
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "site" / "tutorial" / "quickstart.html").is_file()
    shutil.copytree(DOCS, tmp_path / "docs")
    (tmp_path / "docs" / "tutorial" / "quickstart.md").write_text("# Quickstart\n\n[gone](nowhere.md)\n")
    hook = REPOSITORY / "scripts" / "documentation_site.py"
    changed = config.replace("docs_dir: docs", f"docs_dir: {tmp_path / 'docs'}")
    (tmp_path / "mkdocs.yml").write_text(changed.replace("scripts/documentation_site.py", str(hook)))
    broken = build("--config-file", str(tmp_path / "mkdocs.yml"))
    assert broken.returncode != 0
    assert "nowhere.md" in broken.stderr
