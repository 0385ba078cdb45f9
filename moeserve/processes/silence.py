"""How long one process of a server may owe another an answer; and what its children do about a silent launcher."""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import Final

from moeserve.processes.process_state import state_of

DEFAULT_LIMIT_S: Final = 60.0  # a router waits as long for a worker that takes none of a long plan's bytes
LEAST_LIMIT_S: Final = 4.0
MOST_COUNTED_S: Final = 1.0  # of the time between two looks

log = logging.getLogger(__name__)


def longest_silence(step_timeout: float | None) -> float:
    """Seconds after which a process that owes an answer counts as hung; step_timeout: that of the configuration."""
    return max(DEFAULT_LIMIT_S if step_timeout is None else step_timeout, LEAST_LIMIT_S)


class LauncherWatch:
    """What a child does where its launcher stands still: nothing that is lost would be replaced.

    The launcher asks each child for heartbeats, and so one that asks for none is stopped or hangs. A stopped one is
    continued. One that does nothing then, while something is lost, is killed, and the kernel ends its children with it:
    a server that waits for ever becomes one that its supervisor starts again.

    The time in which the child would have heard nothing itself does not count: it was stopped, or busy."""

    def __init__(self, pid: int | None, limit_s: float) -> None:
        """`pid` None: there is no launcher, and `look` does nothing."""
        self._pid = pid
        self._limit_s = limit_s
        self._silent_s = 0.0
        self._looked_at = time.monotonic()
        self._was_continued = False

    @property
    def is_silent(self) -> bool:
        """It has not asked for a heartbeat for longer than it ever should."""
        return self._pid is not None and self._silent_s >= self._limit_s

    def asked(self) -> None:
        """It has asked for a heartbeat."""
        self._silent_s = 0.0
        self._was_continued = False

    def look(self, *, is_needed: bool) -> None:
        """To be called once a second or oftener. is_needed: something is lost, which only the launcher replaces."""
        now = time.monotonic()
        self._silent_s += min(now - self._looked_at, MOST_COUNTED_S)
        self._looked_at = now
        if self._pid is None or not self.is_silent:  # the first for mypy
            return
        if not self._was_continued and state_of(self._pid).is_stopped:
            self._was_continued = True
            log.warning(
                "the launcher has asked for nothing for %.0f s, because it was stopped; it is continued",
                self._silent_s,
            )
            os.kill(self._pid, signal.SIGCONT)
        if is_needed and self._silent_s >= 2 * self._limit_s:
            log.error("the launcher does not answer, and something is lost: the server ends")
            os.kill(self._pid, signal.SIGKILL)
            self._silent_s = 0.0  # where it cannot be killed from within its container, this is said again
