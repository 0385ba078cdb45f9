"""The built wheel in an environment of its own, without a compiler: its demonstration model answers a question.

`make test-wheel` builds the wheels in dist/, and says by MOESERVE_WHEEL_PYTHONS for which interpreters.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

from tests.support.servers.server import REPOSITORY

PYTHONS = os.environ.get("MOESERVE_WHEEL_PYTHONS", "").split()
PROGRAM = Path(__file__).with_name("answer_a_question.py")
WHEELS = sorted((REPOSITORY / "dist").glob("moeserve-*.whl"))

# Each environment gets PyTorch, which may be gigabytes to download.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
if not PYTHONS:
    pytest.skip("make test-wheel names the interpreters", allow_module_level=True)


@pytest.fixture(params=PYTHONS)
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The interpreter of an environment with the wheel in it and what that depends on."""
    subprocess.run([request.param, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    pip = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--only-binary=:all:",
    ]
    subprocess.run(
        [*pip, "--no-index", "--no-deps", "--find-links", str(REPOSITORY / "dist"), "moeserve"], check=True
    )
    # The second command has no tools beside pip: nothing can be compiled.
    subprocess.run([*pip, "moeserve"], check=True, env=os.environ | {"PATH": "", "CC": "", "CXX": ""})
    return python


def test_the_wheel_answers_a_question(environment: Path) -> None:
    done = subprocess.run([environment, PROGRAM], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    print(done.stdout)


@pytest.mark.parametrize("wheel", WHEELS, ids=lambda path: path.name)
def test_a_wheel_is_for_old_systems_too(wheel: Path) -> None:
    """Its tag names a glibc, so that pip refuses it where it could not be loaded."""
    _, _, _, tags = parse_wheel_filename(wheel.name)
    assert all(
        tag.platform.startswith("manylinux_") or tag.platform == "manylinux2014_x86_64" for tag in tags
    )


def test_there_is_a_wheel_for_this_interpreter() -> None:
    ours = set(sys_tags())
    assert any(parse_wheel_filename(wheel.name)[3] & ours for wheel in WHEELS), (sys.version, WHEELS)


@pytest.mark.parametrize("wheel", WHEELS, ids=lambda path: path.name)
def test_a_wheel_has_all_that_the_package_has(wheel: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "moeserve"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.split()
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in tracked if not name.startswith("moeserve/kernels/csrc/")} <= packed
    assert not {name for name in packed if name.startswith(("tests/", "benchmarks/", "training/"))}
