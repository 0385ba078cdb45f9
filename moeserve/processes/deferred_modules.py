"""Defers the loading of modules of other packages until an attribute of theirs is used.

`importlib.util.LazyLoader` loads at any access. Here, names that begin with `__` never load the module, because
`inspect` reads them from all modules: those that are not set yet, such as `__version__`, raise AttributeError.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_lock = threading.RLock()


class DeferredModule(ModuleType):
    """A module that loads itself at the first access to an attribute that it does not have yet."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        load(self)
        return getattr(self, name)


def defer(*names: str) -> None:
    """Defers the named modules, unless they are imported already. A later import statement does not load them."""
    sys.meta_path.insert(0, _Finder(names))


def load(module: ModuleType) -> None:
    """Loads a deferred module; leaves any other module unchanged."""
    with _lock:
        if isinstance(module, DeferredModule):
            deferring = module.__loader__
            assert isinstance(deferring, _Deferring)
            # before the module's code runs, which may import itself
            object.__setattr__(module, "__class__", ModuleType)
            module.__loader__ = deferring.loader
            deferring.loader.exec_module(module)


def load_named(name: str) -> None:
    """Imports and loads a module, deferred or not."""
    load(importlib.import_module(name))


class _Deferring(Loader):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return DeferredModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Finder(MetaPathFinder):
    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Deferring(spec.loader)
        return spec
