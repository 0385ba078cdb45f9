"""What the start of a process saves: modules that are loaded when they are used, and no collections meanwhile."""

from __future__ import annotations

import gc
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moeserve.processes import deferred_modules
from moeserve.processes.deferred_modules import DeferredModule, defer, load_named
from moeserve.processes.imports_without_gc import imports_without_gc

NAME = "moeserve_test_deferred"


@pytest.fixture
def module_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that counts how often its code has run, deferred."""
    path = tmp_path / f"{NAME}.py"
    path.write_text(f"import {NAME}\nruns = globals().get('runs', 0) + 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    defer(NAME)
    yield path
    sys.modules.pop(NAME, None)


def test_a_deferred_module_is_loaded_once_when_it_is_used(module_file: Path) -> None:
    module = importlib.import_module(NAME)
    assert type(module) is DeferredModule
    assert importlib.import_module(NAME) is module
    assert module.__file__ == str(module_file)
    assert not hasattr(module, "__path__")
    inspect.getmodule(inspect.currentframe())  # looks at all modules
    assert "runs" not in vars(module)
    assert module.runs == 1
    assert type(module) is type(sys)
    assert module.runs == 1
    with pytest.raises(AttributeError):
        _ = module.absent


def test_a_name_that_it_lacks_is_an_error_as_ever(module_file: Path) -> None:
    module = importlib.import_module(NAME)
    with pytest.raises(AttributeError):
        _ = module.absent
    assert module.runs == 1


def test_one_can_be_loaded_at_once(module_file: Path) -> None:
    load_named(NAME)
    assert vars(sys.modules[NAME])["runs"] == 1
    load_named(NAME)
    assert vars(sys.modules[NAME])["runs"] == 1


def test_other_modules_are_left_alone(module_file: Path) -> None:
    deferred_modules.load(deferred_modules)
    assert importlib.util.find_spec("no_such_module_of_anybody") is None
    assert type(importlib.import_module("colorsys")) is type(sys)


def test_nothing_is_collected_while_modules_are_imported() -> None:
    assert gc.isenabled()
    try:
        with imports_without_gc():
            assert not gc.isenabled()
            with imports_without_gc():
                pass
            assert not gc.isenabled()
            made: list[object] = []
        assert gc.isenabled()
        assert not any(one is made for one in gc.get_objects())
    finally:
        gc.unfreeze()
