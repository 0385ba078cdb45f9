"""What a launcher starts: modules that are there, of the moeserve that it is itself."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

from moeserve.launcher.process_table import LINK, PROCESSES
from moeserve.launcher.zygote.client import MODULE
from moeserve.processes.lifecycle import python_environment
from tests.support.servers.server import REPOSITORY


@pytest.mark.parametrize("module", [*(f"moeserve.{name}" for name in (*PROCESSES, MODULE)), LINK])
def test_every_process_has_its_module(module: str) -> None:
    """One that is not there is seldom missed: without a zygote, processes are started the ordinary way."""
    found = find_spec(module)
    assert found is not None
    assert found.submodule_search_locations is None or find_spec(f"{module}.__main__") is not None


def test_a_child_runs_the_same_moeserve() -> None:
    """And finds nothing else in its folder: the package's own modules are not at the top."""
    first, *_ = python_environment()["PYTHONPATH"].split(os.pathsep)
    assert first == str(REPOSITORY)


@pytest.mark.parametrize("given", [":/one", "/one:", "/one::", ":"])
def test_an_empty_entry_of_a_path_is_dropped(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands for the working directory: PYTHONPATH=$PYTHONPATH:/one has one where there was none before."""
    monkeypatch.setenv("PYTHONPATH", given)
    entries = python_environment()["PYTHONPATH"].split(os.pathsep)
    assert entries == [str(REPOSITORY), *(["/one"] if "one" in given else [])]
