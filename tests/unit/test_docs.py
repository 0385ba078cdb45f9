"""What docs/ says of flags, endpoints and metrics is so, and its links lead somewhere."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moeserve.config import ServerConfig
from moeserve.httpserver.observability.metrics import Metrics

REPOSITORY = Path(__file__).parents[2]
SERVING = (REPOSITORY / "docs" / "serving.md").read_text()


def test_generated_pages_are_what_the_code_says() -> None:
    check = subprocess.run(
        [sys.executable, "scripts/generate_docs.py", "--check"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert check.returncode == 0, check.stdout + check.stderr


@pytest.mark.parametrize("page", ["serving.md", "quickstart.md", "troubleshooting.md"])
def test_no_flag_is_documented_that_is_not_there(page: str) -> None:
    flags = {"--" + option.name.replace("_", "-") for option in dataclasses.fields(ServerConfig)}
    documented = set(re.findall(r"--[a-z][a-z-]+", (REPOSITORY / "docs" / page).read_text()))
    assert documented - flags == set()


def test_every_page_is_in_the_index() -> None:
    index = (REPOSITORY / "docs" / "README.md").read_text()
    pages = {page.name for page in (REPOSITORY / "docs").glob("*.md")} - {"README.md"}
    assert {name for name in pages if f"]({name})" not in index} == set()


def test_metrics_are_documented() -> None:
    exposition = Metrics("model").render()[0].decode()
    exposed = {name.removesuffix("_total") for name in re.findall(r"^# TYPE (\S+)", exposition, re.MULTILINE)}
    documented = {name.removesuffix("_total") for name in re.findall(r"moeserve:\w+", SERVING)}
    assert documented == exposed


def test_links_lead_somewhere() -> None:
    for page in [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
