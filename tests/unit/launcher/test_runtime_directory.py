"""The private directory of a server: where it is, and that killed launchers' directories go, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moeserve.errors import ConfigError
from moeserve.launcher.runtime_directory import LOCK, remove_stale, runtime_directory
from moeserve.processes.runtime_paths import RuntimePaths

HOLD = """
import sys
from moeserve.launcher.runtime_directory import runtime_directory
with runtime_directory() as directory:
    print(directory, flush=True)
    sys.stdin.read()
"""


def launcher(base: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that holds a directory until its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        env=os.environ | {"XDG_RUNTIME_DIR": str(base)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_launcher_left_goes_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    killed, stale = launcher(tmp_path)
    lives, used = launcher(tmp_path)
    (stale / "config.json").write_text("{}")
    with runtime_directory():
        assert stale.exists(), "its launcher lives"
    killed.kill()
    killed.communicate()
    with runtime_directory() as directory:
        assert sorted(tmp_path.iterdir()) == sorted([used, directory])
    lives.communicate()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_certainly_stale_stays(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    (outside / LOCK).touch()
    (tmp_path / "moeserve-link").symlink_to(outside)
    (tmp_path / "moeserve-file").touch()
    (tmp_path / "moeserve-older").mkdir(mode=0o700)  # has no lock
    (tmp_path / "moeserve-open").mkdir(mode=0o755)
    (tmp_path / "moeserve-open" / LOCK).touch()
    (tmp_path / "moeserve-lock").mkdir(mode=0o700)
    (tmp_path / "moeserve-lock" / LOCK).symlink_to(outside / LOCK)
    before = sorted(tmp_path.rglob("*"))
    remove_stale(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a directory away")
def test_other_users_directories_stay(tmp_path: Path) -> None:
    directory = tmp_path / "moeserve-others"
    directory.mkdir(mode=0o700)
    (directory / LOCK).touch()
    os.chown(directory, 65534, 65534)
    remove_stale(tmp_path)
    assert (directory / LOCK).exists()


def test_long_runtime_directory_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with runtime_directory() as directory:
        assert long not in directory.parents
        assert len(RuntimePaths(directory).detokenizer.removeprefix("ipc://")) <= 107
    assert not directory.exists()


def test_no_place_for_sockets_is_an_error_that_names_the_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    monkeypatch.setattr("tempfile.mkdtemp", _no_space)
    with pytest.raises(ConfigError, match=r"missing.*No space left"), runtime_directory():
        pass


def _no_space(prefix: str, dir: str) -> str:
    raise OSError(28, "No space left on device")
