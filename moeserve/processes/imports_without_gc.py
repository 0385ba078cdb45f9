"""Imports modules at process start with the garbage collector suspended.

Module objects live until the process ends. The collector would scan them repeatedly during the imports, and again in
every later full collection, which pauses all streams.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imports_without_gc() -> Iterator[None]:
    """Suspends the garbage collector. Objects created inside the context are exempt from all later collections."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
