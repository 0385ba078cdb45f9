"""The command itself: how it is started, and how it ends without a traceback."""

from __future__ import annotations

import importlib.abc
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from moeserve.__main__ import run
from moeserve.cli import main as cli
from tests.support.servers.server import REPOSITORY


@pytest.mark.parametrize("command", [["launch.py"], ["-m", "moeserve"], ["-m", "moeserve", "serve"]])
def test_three_ways_to_the_same_command(command: list[str]) -> None:
    run = subprocess.run(
        [sys.executable, *command, "--model", "/no/such.gguf"],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=60,
        check=False,
    )
    assert run.returncode == 2
    assert "--model or MOESERVE_MODEL: there is no /no/such.gguf" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_python_without_our_packages_is_told_so_in_a_line() -> None:
    """`python3 launch.py` outside of the environment that `make serve` has made."""
    program = "import sys; sys.modules['msgspec'] = None; from moeserve.__main__ import run; sys.exit(run())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 2
    (said,) = done.stderr.splitlines()
    assert said.startswith(f"moeserve: {sys.executable} (Python ")
    assert "does not have msgspec, which moeserve needs" in said


def test_an_old_python_is_told_so_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    assert run() == 2
    assert "is too old: 3.11 is needed at least" in capsys.readouterr().err
    assert (
        tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["requires-python"] == ">=3.11"
    )


@pytest.mark.parametrize("command", [["list"], ["completion", "bash"]])
def test_a_closed_pipe_and_a_full_disk_leave_no_traceback(command: list[str], tmp_path: Path) -> None:
    """`moeserve list | head -1`, and `moeserve list > file` where there is no room."""
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    for output, code, says in (
        (writer, 141, ""),
        (full, 1, "the output could not be written: No space left"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "moeserve", *command],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env=os.environ | {"HF_HUB_CACHE": str(tmp_path)},
        )
        os.close(output)
        assert done.returncode == code
        assert done.stderr.startswith(f"moeserve: {says}") if says else done.stderr == ""


class InterruptedImport(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, *_: object) -> None:
        if name == "moeserve.cli.main":
            raise KeyboardInterrupt


def test_ctrl_c_leaves_no_traceback_even_while_modules_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["moeserve", "plan"])
    monkeypatch.setitem(cli.COMMANDS, "plan", cli.Command(interrupted, ""))
    assert run() == 130
    monkeypatch.delitem(sys.modules, "moeserve.cli.main")
    monkeypatch.setattr(sys, "meta_path", [InterruptedImport(), *sys.meta_path])
    assert run() == 130
