"""A benchmark that compares checkouts runs the code of each, whatever is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.servers.server import REPOSITORY, imports_from

WHICH = "import moeserve, sys; sys.stdout.write(moeserve.__file__)"


def imported(checkout: Path, *flags: str) -> Path:
    environment = dict(os.environ) | imports_from(checkout)
    command = [sys.executable, *flags, "-c", WHICH]
    done = subprocess.run(
        command, env=environment, cwd=checkout, stdout=subprocess.PIPE, text=True, check=True
    )
    return Path(done.stdout)


def test_a_checkout_that_is_not_installed_is_the_one_that_runs(tmp_path: Path) -> None:
    package = tmp_path / "moeserve" / "__init__.py"
    package.parent.mkdir()
    package.touch()
    assert imported(tmp_path) == package
    assert imported(tmp_path, "-P") == package  # as the launcher starts its processes
    assert imported(REPOSITORY).is_relative_to(REPOSITORY)
