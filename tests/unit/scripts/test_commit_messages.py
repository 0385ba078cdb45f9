"""The commit-msg hook, on files and on a repository's own commits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "check_commit_messages.py"
BODY = "\n\nBecause it was not.\n"


def check(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120, check=False)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("router: what changes" + BODY, None),
        ("docs: " + "x" * 66 + BODY, None),
        ("# a comment\n\nrouter: what changes" + BODY + "# another\n", None),
        ("Merge branch 'x'\n", None),
        ("fixup! What changes\n", None),
        ("router: what changes\n\nWhy.\n# ------------------------ >8 ----\ndiff --git", None),
        ("docs: " + "x" * 67 + BODY, "the subject has 73 characters"),
        ("router: what changes.", "ends in a full stop"),
        ("router: what changes\nBecause it was not.\n", "the second line is not empty"),
        ("router: what changes\n", "there is no body"),
        ("router: what changes\n\n# only a comment\n", "there is no body"),
        ("What changes" + BODY, "does not begin with its scope"),
        ("kv, adapters: what changes" + BODY, None),
        ("# nothing\n", "the message is empty"),
    ],
)
def test_a_message(tmp_path: Path, message: str, problem: str | None) -> None:
    path = tmp_path / "COMMIT_EDITMSG"
    path.write_text(message)
    done = check(path)
    assert done.returncode == (problem is not None)
    assert (problem or "") in done.stderr
    assert bool(done.stderr) == (problem is not None)


def test_the_commits_of_a_range(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "core.hooksPath=/dev/null")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, timeout=120)

    git("init", "--initial-branch", "main")
    for message in ("Before the range", "x: good" + BODY, "x: bad", "x: " + "y" * 80 + BODY):
        git("commit", "--allow-empty", "--message", message)
    done = check("--range", "main~3..main", cwd=tmp_path)
    assert done.returncode == 1
    assert [line.rpartition(": ")[2][:4] for line in done.stderr.splitlines()] == ["bad'", "yyyy"]
    assert check("--range", "main~3..main~2", cwd=tmp_path).returncode == 0
