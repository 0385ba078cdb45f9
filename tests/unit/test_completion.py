"""Completion of the command line in bash, zsh and fish."""

from __future__ import annotations

import contextlib
import io
import shutil
import subprocess
from pathlib import Path

import pytest

from moeserve.cli import main as cli
from moeserve.cli.bench.commands import COMMANDS as MEASUREMENTS

REPOSITORY = Path(__file__).resolve().parents[2]
BASH = shutil.which("bash")


@pytest.mark.skipif(BASH is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["pl"], {"plan"}),
        (["--dev"], {"--device"}),
        (["serve", "--device", ""], {"auto", "cpu", "cuda"}),
        (["bench", "s"], {"serve", "steps"}),
        (["bench", "engine", "--pro"], {"--prompt"}),
        (["bench", "trace", "--preset", "u"], {"uniform"}),
        (["cache", ""], {"list", "verify", "prune"}),
        (["cache", "list", "--"], {"--help"}),
        (["cache", "list", "pyproject.t"], set()),
        (["plan", "--gpu-mem"], {"--gpu-memory", "--gpu-memory-budget"}),
        (["serve", "--model", "pyproject.t"], set()),  # the shell completes paths
        (["serve", "pyproject.t"], set()),
    ],
)
def test_bash_completes(words: list[str], offered: set[str], completion_script: Path) -> None:
    line = " ".join(f"'{word}'" for word in ["moeserve", *words])
    script = f"source {completion_script}; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _moeserve\n"
    script += 'printf "%s\\n" "${COMPREPLY[@]}"'
    assert BASH is not None
    run = subprocess.run([BASH, "-c", script], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert set(run.stdout.split()) == offered
    assert run.stderr == ""


@pytest.fixture(scope="module")
def completion_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert cli.main(["completion", "bash"]) == 0
    path = tmp_path_factory.mktemp("completion") / "moeserve.bash"
    path.write_text(printed.getvalue())
    return path


def test_completion_for_the_other_shells(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "zsh"]) == 0
    assert "bashcompinit" in capsys.readouterr().out
    assert cli.main(["completion", "fish"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("complete -c moeserve -n ") for line in lines)
    assert any(
        "'__fish_seen_subcommand_from serve' -l device -x -a 'auto cpu cuda'" in line for line in lines
    )
    seen = "__fish_seen_subcommand_from"
    after_cache = f"'{seen} cache; and not {seen} list verify prune' -f -a 'list verify prune'"
    assert f"complete -c moeserve -n {after_cache}" in lines
    assert cli.main(["completion", "tcsh"]) == 2


def test_every_command_completes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "fish"]) == 0
    printed = capsys.readouterr().out
    without_flags = {"completion", "bench", "cache"}  # the last two have commands
    for command in cli.COMMANDS.keys() - without_flags:
        assert f"__fish_seen_subcommand_from {command}' -l " in printed, command
    for measurement in MEASUREMENTS:
        assert f"and __fish_seen_subcommand_from {measurement}' -l " in printed, measurement
