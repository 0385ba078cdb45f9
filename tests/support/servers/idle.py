"""Whether something rests: a stretch of time in which it does next to nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

PATIENCE_S: Final = 30.0


def comes_to_rest(used: Callable[[], float], most: float, seconds: float = 0.5) -> bool:
    """Whether there is a stretch of `seconds` in which `used`, a count or seconds of CPU, grows by `most` at most.

    What is at work when the test looks first, or on a busy machine still, has PATIENCE_S to end. What looks again and
    again, or spins, has no such stretch."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        before = used()
        time.sleep(seconds)
        if used() - before <= most:
            return True
    return False
