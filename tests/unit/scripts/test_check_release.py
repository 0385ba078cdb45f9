"""Which tags are releases."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "check_release.py"
RELEASED = """# Changelog

## [Unreleased]

## [1.2.3] - 2026-11-27

### Added
- A flag.

## [1.2.2] - 2026-01-01
- Another.
"""


def check(tmp_path: Path, tag: str, changelog: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "moeserve").mkdir()
    (tmp_path / "moeserve" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text(changelog)
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / SCRIPT.name
    script.write_text(SCRIPT.read_text())
    command = [sys.executable, str(script), tag]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_release_prints_its_notes(tmp_path: Path) -> None:
    done = check(tmp_path, "v1.2.3", RELEASED)
    assert (done.returncode, done.stdout) == (0, "### Added\n- A flag.\n")


@pytest.mark.parametrize(
    ("tag", "changelog", "problem"),
    [
        ("v1.2.4", RELEASED, "the tag is v1.2.4"),
        ("1.2.3", RELEASED, "the tag is 1.2.3"),
        ("v1.2.3", RELEASED.replace("[Unreleased]\n", "[Unreleased]\n- More.\n"), "Unreleased"),
        ("v1.2.3", RELEASED.replace(" - 2026-11-27", ""), "no entry of 1.2.3 with a date"),
    ],
)
def test_another_tag_is_none(tmp_path: Path, tag: str, changelog: str, problem: str) -> None:
    done = check(tmp_path, tag, changelog)
    assert done.returncode == 1
    assert problem in done.stderr
    assert not done.stdout
