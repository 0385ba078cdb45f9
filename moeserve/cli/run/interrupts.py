"""Handles Ctrl-C while an answer arrives."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def single_interrupt() -> Iterator[None]:
    """Returns a context in which the first Ctrl-C raises KeyboardInterrupt. Further ones are ignored, because they
    would interrupt storing the answer so far. May be used only by the main thread."""
    has_come = False

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal has_come
        if not has_come:
            has_come = True
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
