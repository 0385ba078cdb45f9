"""A process that watches a launcher whose only other child may be lost: it resumes the launcher if a signal stopped it.

A stopped launcher can neither resume nor replace the front process (`front/launch.py`). A front that is stopped or lost
at the same time cannot resume the launcher either, so a third process does it. The watchdog is a fork of the launcher
with hardly any memory of its own. It ends with the launcher, which replaces it if it is lost.
"""

from __future__ import annotations

import math
import os
import signal
import time
from contextlib import suppress
from typing import Final, NoReturn

from setproctitle import setproctitle

from moeserve.launcher.child_process import Child
from moeserve.processes.lifecycle import die_with
from moeserve.processes.silence import LauncherWatch

NAME: Final = "watchdog"
_FIRST_DESCRIPTOR: Final = 3  # after standard input, output and error
_MOST_DESCRIPTORS: Final = 1 << 20


class Watchdog:
    """The launcher's side. Only the main thread touches it."""

    def __init__(self, interval_s: float) -> None:
        """interval_s: seconds between two looks at the launcher; it is resumed if it is stopped at two in a row."""
        self._interval_s = interval_s
        self._child = self._fork()

    def look(self) -> None:
        """Replaces the watchdog if it is lost, and resumes it if it was stopped. Call it once per interval."""
        if self._child.alive:
            self._child.go_on()
        else:
            self._child.close()
            self._child = self._fork()

    def close(self) -> None:
        self._child.kill()
        self._child.close()

    def _fork(self) -> Child:
        launcher = os.getpid()
        pid = os.fork()
        if pid == 0:
            _watch(launcher, self._interval_s)
        with suppress(OSError):  # the child does the same; the first of the two has the effect
            os.setpgid(pid, pid)
        return Child.adopt(NAME, pid)


def _watch(launcher: int, interval_s: float) -> NoReturn:
    """Runs the watchdog in the forked process."""
    try:
        os.setpgid(0, 0)  # the terminal's Ctrl-C reaches only the launcher
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, signal.SIG_IGN)
        die_with(launcher)
        os.closerange(_FIRST_DESCRIPTOR, _MOST_DESCRIPTORS)  # the launcher's sockets
        setproctitle(f"moeserve: {NAME}")
        watch = LauncherWatch(launcher, math.inf)
        while True:
            time.sleep(interval_s)
            watch.resume_stopped()
    finally:
        os._exit(1)
