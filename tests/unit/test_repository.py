"""What the files around the code say of it: workflows call targets that are there, the version stands in one place."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from moeserve import __version__

REPOSITORY = Path(__file__).resolve().parents[2]
GITHUB = REPOSITORY / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
MAKE = re.compile(r"make ([a-z-]+)")
PROJECT: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def targets() -> set[str]:
    phony = re.search(r"^\.PHONY: (.+)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    return set(phony[1].split())


def steps(workflow: Path) -> Iterator[dict[str, Any]]:
    for job in yaml.safe_load(workflow.read_text())["jobs"].values():
        assert job["runs-on"]
        assert job["timeout-minutes"] > 0
        yield from job["steps"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_the_makefiles_targets_and_nothing_else(workflow: Path) -> None:
    commands = [step["run"] for step in steps(workflow) if "run" in step]
    assert commands
    for command in commands:
        called = MAKE.fullmatch(command)
        assert called is not None, f"{command!r} is no target of the Makefile"
        assert called[1] in targets()


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_may_read_only_and_name_the_versions_of_actions(workflow: Path) -> None:
    content = yaml.safe_load(workflow.read_text())
    assert content["permissions"] == {"contents": "read"}
    assert content["name"]
    assert content[True]  # YAML 1.1 reads the key `on` as true
    for step in steps(workflow):
        assert "run" in step or re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"])


def test_actions_run_on_a_node_that_runners_have() -> None:
    """Runners have Node 24: the actions' first versions for it. Those before are for Node 20, which runners dropped in
    September 2026."""
    oldest = {"actions/checkout": 5, "actions/setup-python": 6, "actions/upload-artifact": 6}
    used = [step["uses"].split("@v") for workflow in WORKFLOWS for step in steps(workflow) if "uses" in step]
    assert {name for name, _ in used} >= oldest.keys()
    assert [(name, version) for name, version in used if int(version) < oldest.get(name, 1)] == []


def test_checkouts_keep_no_token_but_where_a_job_pushes() -> None:
    for workflow in WORKFLOWS:
        for job in yaml.safe_load(workflow.read_text())["jobs"].values():
            pushes = job.get("permissions", {}).get("contents") == "write"
            (checkout,) = (
                step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@")
            )
            assert checkout.get("with", {}).get("persist-credentials", True) is pushes, (
                workflow.stem,
                job["name"],
            )


def test_what_ci_checks() -> None:
    called = {step.get("run") for workflow in WORKFLOWS for step in steps(workflow)}
    assert called >= {
        "make lint",
        "make test-unit",
        "make coverage",
        "make test",
        "make test-all",
        "make test-gpu",
        "make test-arm",
        "make test-wheel-arm",
        "make test-serve-arm",
        "make test-wheel",
        "make check-commits",
        "make release",
        "make test-images",
    }


def test_owners_are_of_paths_that_are_there() -> None:
    lines = [
        line.split() for line in (GITHUB / "CODEOWNERS").read_text().splitlines() if line[:1] not in ("", "#")
    ]
    assert lines[0][0] == "*"
    for path, *owners in lines:
        assert path == "*" or (REPOSITORY / path.strip("/")).exists(), path
        assert owners
        assert all(owner.startswith("@") for owner in owners)


def test_no_text_from_outside_becomes_a_command() -> None:
    """A title or a branch's name in `${{ }}` inside a `run` would be executed."""
    for workflow in WORKFLOWS:
        assert not [step for step in steps(workflow) if "${{" in step.get("run", "")]


def test_every_target_is_explained() -> None:
    explained = set(re.findall(r"^#   make ([a-z-]+)", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    assert targets() - {"lint", "browser", "clean"} <= explained
    assert explained <= targets()


def test_the_version_stands_in_one_place() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    provider = PROJECT["tool"]["scikit-build"]["metadata"]["version"]
    assert provider["provider"] == "scikit_build_core.metadata.regex"
    # The provider's own pattern for a version.
    found = re.search(
        r'^(?:__version__|VERSION)(?: ?: ?str)? *= *([\'"])v?(?P<value>.+?)\1',
        (REPOSITORY / provider["input"]).read_text(),
        re.MULTILINE,
    )
    assert found is not None
    assert found["value"] == __version__


def test_no_file_has_marks_of_a_conflict() -> None:
    marks = re.compile(r"^(<{7}|>{7}) ", re.MULTILINE)
    parts = [
        REPOSITORY / part
        for part in ("moeserve", "tests", "docs", "deploy", "scripts", "benchmarks", ".github")
    ]
    files = [path for part in parts for path in part.rglob("*")] + list(REPOSITORY.glob("*"))
    texts = {".cpp", ".h", ".html", ".inl", ".js", ".md", ".py", ".sh", ".toml", ".yaml", ".yml", ""}
    marked = [
        path.relative_to(REPOSITORY)
        for path in files
        if path.is_file() and path.suffix in texts and marks.search(path.read_text(errors="replace"))
    ]
    assert not marked


def test_no_source_file_is_longer_than_400_lines() -> None:
    suffixes = {".py", ".cpp", ".h", ".inl"}
    sources = [path for path in (REPOSITORY / "moeserve").rglob("*") if path.suffix in suffixes]
    assert len(sources) > 500
    long = [path for path in sources if len(path.read_text().splitlines()) > 400]
    assert not long


def test_benchmarks_are_few_and_each_is_in_the_table() -> None:
    """At most 25 programs and 6,000 lines, with their parts."""
    folder = REPOSITORY / "benchmarks"
    sources = {path: path.read_text() for path in folder.rglob("*.py")}
    assert sum(len(text.splitlines()) for text in sources.values()) <= 6000
    programs = {
        str(path.relative_to(folder)) for path, text in sources.items() if '__name__ == "__main__"' in text
    }
    assert len(programs) <= 25
    assert programs == set(re.findall(r"\]\((\S+\.py)\)", (folder / "README.md").read_text()))


def test_the_changelog_has_this_version() -> None:
    """The newest entry is this version's, or what comes after it."""
    headings = re.findall(r"^## \[(.+?)\](.*)$", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    names = [name for name, _ in headings]
    assert names[0] == "Unreleased"
    assert names[1] == __version__
    for _, date in headings[1:]:
        assert re.fullmatch(r" - \d{4}-\d\d-\d\d", date)


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", (REPOSITORY / page).read_text()):
        assert (REPOSITORY / target).exists(), target


@pytest.mark.parametrize(
    "form", sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_issue_forms_are_whole(form: Path) -> None:
    content = yaml.safe_load(form.read_text())
    if form.stem == "config":
        assert set(content) == {"blank_issues_enabled", "contact_links"}
        return
    assert {"name", "description", "body"} <= set(content)
    for element in content["body"]:
        assert element["type"] in {"markdown", "textarea", "input", "dropdown", "checkboxes"}
        assert "label" in element["attributes"] or "value" in element["attributes"]
