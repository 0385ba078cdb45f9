"""Time limits for answers between a server's processes, and the children's reaction to a launcher that hangs."""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import Final

from moeserve.config import ServerConfig
from moeserve.processes.process_state import state_of

DEFAULT_LIMIT_S: Final = 60.0  # default; also the router's limit for a worker that stops reading a long plan
LEAST_LIMIT_S: Final = 4.0
BEATS: Final = 4  # heartbeats within the longest silence, of a process that sends them unasked
# silence counted per look, at most: longer gaps mean that the child itself was stopped
MOST_COUNTED_S: Final = 1.0

log = logging.getLogger(__name__)


def longest_silence(step_timeout: float | None) -> float:
    """Returns the seconds after which a process that owes an answer counts as hung. step_timeout: from the
    configuration."""
    return max(DEFAULT_LIMIT_S if step_timeout is None else step_timeout, LEAST_LIMIT_S)


def beat_interval(config: ServerConfig) -> float:
    """Returns the seconds between two heartbeats that a process sends unasked."""
    return longest_silence(config.step_timeout) / BEATS


class LauncherWatch:
    """A child's watch over its launcher. While the launcher hangs, no process that dies is replaced.

    The launcher asks each child for heartbeats; if it stops asking, it is stopped or hangs. A stopped launcher is
    resumed with SIGCONT. If that does not help while a process is missing, the launcher is killed, and the kernel
    then ends its children: the supervisor restarts the server instead of it hanging forever.

    Time during which the child itself was stopped or busy does not count.
    """

    def __init__(self, pid: int | None, limit_s: float) -> None:
        """`pid` of the launcher; None: there is none, and `look` does nothing."""
        self._pid = pid
        self._limit_s = limit_s
        self._silent_s = 0.0
        self._looked_at = time.monotonic()
        self._was_continued = False
        self._was_stopped = False  # at the last `resume_stopped`

    @property
    def is_silent(self) -> bool:
        """True if the launcher has not asked for a heartbeat for longer than the limit."""
        return self._pid is not None and self._silent_s >= self._limit_s

    def asked(self) -> None:
        """Notes that the launcher asked for a heartbeat."""
        self._silent_s = 0.0
        self._was_continued = False

    def resume_stopped(self) -> None:
        """Resumes the launcher if it was stopped at the last call too. For a child that sends heartbeats unasked, which
        no silence tells of a stopped launcher; call it once per heartbeat."""
        is_stopped = self._pid is not None and state_of(self._pid).is_stopped
        if is_stopped and self._was_stopped:
            assert self._pid is not None
            log.warning("the launcher was stopped; it is continued")
            os.kill(self._pid, signal.SIGCONT)
        self._was_stopped = is_stopped

    def look(self, *, is_needed: bool) -> None:
        """Checks the launcher; call it at least once a second. is_needed: a process has died that only the launcher
        can replace."""
        now = time.monotonic()
        self._silent_s += min(now - self._looked_at, MOST_COUNTED_S)
        self._looked_at = now
        if self._pid is None or not self.is_silent:  # the first condition is for mypy
            return
        if not self._was_continued and state_of(self._pid).is_stopped:
            self._was_continued = True
            log.warning(
                "the launcher was stopped and has sent nothing for %.0f s; it is continued",
                self._silent_s,
            )
            os.kill(self._pid, signal.SIGCONT)
        if is_needed and self._silent_s >= 2 * self._limit_s:
            log.error("the launcher does not answer and cannot replace a lost process: the server ends")
            os.kill(self._pid, signal.SIGKILL)
            self._silent_s = 0.0  # inside a container it may not be killable; then this repeats
