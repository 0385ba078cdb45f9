"""One process of the server, as the launcher sees it: start, watch, kill."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Final

import psutil

from moeserve.config import ENV_PREFIX, LAUNCHER_PID_ENV
from moeserve.config.units import GIB
from moeserve.processes.begin import EXIT_NOT_IMPORTED
from moeserve.processes.control_groups import MemoryKills, memory_kills, memory_limit
from moeserve.processes.lifecycle import python_environment
from moeserve.processes.process_state import state_of
from moeserve.processes.runtime_paths import RuntimePaths, has_working_directory

END_S: Final = 10.0  # wait for a killed process to end; the kernel first frees gigabytes of its memory

log = logging.getLogger(__name__)

_HINTS: dict[int, str] = {
    signal.SIGKILL: "; out of memory?",
    signal.SIGBUS: "; was the model's file cut short or changed while it was read, or can its disk not be read?",
}


class ServerProcess(ABC):
    """A process of the server and how it ended. `returncode` is None while it runs; a negative value is a signal."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.begin(pid)

    def begin(self, pid: int) -> None:
        self.pid = pid
        self.started = time.monotonic()
        self.is_reported = False  # the router asked for a replacement; set by the launcher
        self.given_up: str | None = None  # why it was killed at the router's request
        self.was_stopped = False  # it was stopped by a SIGSTOP when it was killed
        self._kills_before = _kills_for_memory()

    @property
    @abstractmethod
    def returncode(self) -> int | None: ...

    @abstractmethod
    def kill(self) -> None:
        """Kills the process if it still runs."""
        ...

    @abstractmethod
    def close(self) -> None:
        """Releases the process's resources."""
        ...

    @property
    def alive(self) -> bool:
        return self.returncode is None

    @property
    def died_by_itself(self) -> bool:
        """True if the process ended without having been killed or stopped from outside."""
        if self.given_up is not None:
            return not self.was_stopped
        return self.returncode != -signal.SIGKILL or self._memory_ran_out

    @property
    def _memory_ran_out(self) -> bool:
        """True if the kernel's OOM killer killed some process of the control group, possibly this one, since this one
        started; where groups do not count that, some process of the machine."""
        return _kills_for_memory().killed > self._kills_before.killed

    @property
    def is_stopped(self) -> bool:
        """True if the process is stopped by a SIGSTOP."""
        return state_of(self.pid).is_stopped

    def go_on(self) -> None:
        """Resumes the process if it was stopped."""
        if self.alive and self.is_stopped:
            log.warning("the %s process is needed, but was stopped; it is continued", self.name)
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)

    def give_up(self, cause: str, *, is_stopped: bool = False) -> None:
        """Kills the process, if it still runs, for the reason `cause`. is_stopped: a process that it waits for is
        stopped."""
        if self.alive and self.given_up is None:
            self.given_up = cause
            self.was_stopped = is_stopped or self.is_stopped
            self.kill()

    def cause_of_death(self) -> str:
        if self.given_up is not None:
            return f"{self.given_up}{', because it was stopped' if self.was_stopped else ''}; killed"
        code = self.returncode
        if code == EXIT_NOT_IMPORTED:
            return f"exit code {code}: a module could not be imported, as the lines above say"
        if code is None or code >= 0:
            return f"exit code {code}"
        hint = _HINTS.get(-code, "")
        kills = memory_kills()
        if code == -signal.SIGKILL and kills is not None and kills.killed > self._kills_before.killed:
            hint = "; memory ran out"
            if kills.hits > self._kills_before.hits and (limit := memory_limit()) is not None:
                hint += f", and a control group limits the server to {limit / GIB:.2f} GiB"
        return f"signal {-code}, {signal.strsignal(-code)}{hint}"


class Adopted:
    """A child process that another process forked; this process became its parent."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)


class Child(ServerProcess):
    """A child process of the launcher. `descriptor` (a pidfd) becomes readable when it ends. `line` is the
    launcher's end of the socket at its standard input, if it has one."""

    def __init__(
        self, name: str, handle: subprocess.Popen[bytes] | Adopted, line: socket.socket | None
    ) -> None:
        super().__init__(name, handle.pid)
        self.line = line
        self._handle = handle
        try:
            self.descriptor = os.pidfd_open(self.pid)
        except OSError:  # no descriptor is left: a process that cannot be watched does not go on
            os.kill(self.pid, signal.SIGKILL)
            raise

    @classmethod
    def adopt(cls, name: str, pid: int) -> Child:
        """Returns a Child for an already forked process, which has its own process group."""
        return cls(name, Adopted(pid), None)

    @classmethod
    def spawn(
        cls,
        name: str,
        module: str,
        paths: RuntimePaths,
        *,
        has_line: bool = False,
        variables: Mapping[str, str] = MappingProxyType({}),
        descriptors: Sequence[int] = (),
    ) -> Child:
        """Starts `module` as a process of its own process group, and returns it. The process inherits `descriptors`
        under the same numbers and gets `variables` added to its environment."""
        environment = python_environment() | {
            ENV_PREFIX + "RUNTIME_DIR": str(paths.directory),
            LAUNCHER_PID_ENV: str(os.getpid()),
            **variables,
        }
        line: socket.socket | None = None
        stdin: socket.socket | None = None
        if has_line:
            line, stdin = socket.socketpair()
        # The child gets its own process group: the terminal's Ctrl-C then reaches only the launcher, even while the
        # child is importing.
        popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "moeserve.processes.begin", module],
            env=environment,
            stdin=subprocess.DEVNULL if stdin is None else stdin.fileno(),
            # possible because all paths of the configuration are absolute
            cwd=None if has_working_directory() else "/",
            process_group=0,
            pass_fds=descriptors,
        )
        if stdin is not None:
            stdin.close()
        return cls(name, popen, line)

    @property
    def returncode(self) -> int | None:
        return self._handle.poll()

    def send_signal(self, signum: int) -> None:
        self._handle.send_signal(signum)

    def kill(self) -> None:
        """Kills the process group: the process and the processes that it started."""
        if self.alive:
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Waits a bounded time for its end; a process blocked in a disk or driver call ends only when that returns."""
        if not has_ended(self.descriptor, END_S):
            log.error(
                "the %s, process %d, has been killed, but has not ended; it is left", self.name, self.pid
            )
        self._handle.poll()
        os.close(self.descriptor)
        if self.line is not None:
            self.line.close()


class Fork(ServerProcess):
    """A worker that the keeper, the process with the weights (`worker/loading/keeper.py`), forked. The keeper
    reports its start and end. `descriptor` (a pidfd) becomes readable when it ends; None: it has ended, or has not
    started."""

    descriptor: int | None = None

    def begin(self, pid: int) -> None:
        """pid 0: not known yet."""
        super().begin(pid)
        self.close()
        self.ended: int | None = None  # exit code, or minus the signal; set by the launcher
        with suppress(ProcessLookupError):
            self.descriptor = os.pidfd_open(pid) if pid else None

    @property
    def awaits_keeper(self) -> bool:
        """True if the worker is gone, and its keeper has reported neither its end nor its successor."""
        return self.alive and (self.descriptor is None or has_ended(self.descriptor))

    @property
    def returncode(self) -> int | None:
        return self.ended

    def kill(self) -> None:
        if self.alive and self.descriptor is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def has_ended(pidfd: int, timeout: float = 0.0) -> bool:
    """Returns whether the process ends within `timeout` seconds."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(timeout * 1000))


def _kills_for_memory() -> MemoryKills:
    """Returns how many processes of the control group the kernel's OOM killer has killed; where groups do not count
    that, of the machine since boot, 0 if the kernel does not tell."""
    if (kills := memory_kills()) is not None:
        return kills
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return MemoryKills(int(count), 0)
    return MemoryKills(0, 0)


def memory_of(pid: int) -> int:
    """Returns the memory of a process in bytes, as proportional set size (PSS); 0 if it is gone."""
    try:
        process = psutil.Process(pid)
        try:
            return int(process.memory_full_info().pss)
        except psutil.AccessDenied:
            return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0
