"""Imports at the start of a process, without the garbage collector.

What a module makes stays until the process ends. The collector would look through all of it again and again while the
modules are imported, and at every full collection later, when all streams wait.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imports_without_gc() -> Iterator[None]:
    """Suspends the garbage collector, which then never looks at objects that were made within."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
