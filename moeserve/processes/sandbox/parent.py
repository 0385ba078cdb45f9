"""The parent's side of a sandboxed process: starts it, sends it requests, kills it if it does not answer in time."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from moeserve.errors import UserError
from moeserve.processes.process_state import state_of

from .frames import receive_frame, send_frame
from .line import FairLine
from .patience import Patience, Starved, Stopped, UsedUp

T = TypeVar("T")

log = logging.getLogger(__name__)

# Wall-clock limit of a start or a request as a multiple of its CPU-time limit; a busy machine slows both down by up to
# this factor.
PATIENCE = 10
LAST_LINES_S = 2.0  # wait for a process that closed its socket to report the cause and exit
# CPU-time limit for the process to start, before it reads any input; an emulated CPU takes half of it
START_SECONDS = 60.0
START_IDLE_SECONDS = (
    60.0  # without any CPU time: the process waits for a disk or a lock, not for the processor
)
# The environment variables that the process gets: only what Python needs, as others could contain the API key.
_PASSED_ENVIRONMENT = (
    "PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "LANG",
    "LC_ALL",
    "TZ",
)


class SandboxTimeout(Exception):
    """The process exceeded its CPU time and was killed. `stage` is the argument of `ask`; `seconds` is the CPU-time
    limit."""

    def __init__(self, stage: str, seconds: float) -> None:
        super().__init__(f"did not {stage} within {seconds:g} s and was stopped")
        self.stage = stage
        self.seconds = seconds


class SandboxLost(Exception):
    """The process is gone; the same request may be sent to a new one."""


class SandboxDied(SandboxLost):
    """The process ended unexpectedly, most likely out of memory."""


class SandboxStopped(SandboxLost):
    """The process had been stopped by a signal (SIGSTOP), and was killed."""


class SandboxUnavailable(UserError):
    """Raised if no sandboxed process can be started at present; the input is not the cause."""


@dataclass(frozen=True, slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    line: socket.socket


class Sandbox:
    """Runs `python -m <module>` in a sandbox, one process and one request at a time. Waiting requests queue up, and
    tenants take turns.

    All blocking calls run on one thread, which starts the process; the process dies with it. After a time-out or a
    crash the next request starts a new process.
    """

    def __init__(
        self, module: str, work: str, *, timeout: float, max_reply_bytes: int, arguments: Sequence[str] = ()
    ) -> None:
        """`work` names the process's purpose in messages. `timeout` is the CPU-time limit of one request in seconds;
        the wall-clock limit is PATIENCE times as much. Starts no process yet."""
        # -P: a file in the current directory must not stand in for a module.
        self._command = [sys.executable, "-P", "-m", module, *arguments]
        self._name = f"the process for {work}"
        self._timeout = timeout
        self._max_reply_bytes = max_reply_bytes
        self._child: _Child | None = None
        # CPU time of all requests so far, unanswered ones included, to the kernel's resolution of 10 ms.
        self.cpu_seconds = 0.0
        self._line = FairLine()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=module.rpartition(".")[2])

    async def run(self, work: Callable[[], T], tenant: str = "") -> T:
        """Runs `work()` on the sandbox's thread, the only one that may call `start`, `ask` and `stop`."""
        async with self._line.turn(tenant):
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def run_sync(self, work: Callable[[], T]) -> T:
        """Runs `work()` on the sandbox's thread and returns its result. Blocks; do not call it on an event loop's
        thread."""
        return self._thread.submit(work).result()

    def close(self) -> None:
        """Ends the process, after the request in progress."""
        self.run_sync(self.stop)
        self._thread.shutdown()

    # ---- everything below runs on the sandbox's thread

    @property
    def is_running(self) -> bool:
        return self._child is not None

    def start(self) -> None:
        """Starts the process and waits for its first frame. Raises SandboxUnavailable."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                self._command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _PASSED_ENVIRONMENT if name in os.environ},
            )
        child = self._child = _Child(process, ours)
        try:
            limits = (START_SECONDS, PATIENCE * START_SECONDS, START_IDLE_SECONDS)
            self._receive("start", Patience(process.pid, ours, *limits))
        except (SandboxTimeout, SandboxLost) as error:
            how = str(error) or f"ended at once (exit code {child.process.returncode}): its own lines say why"
            raise self._unavailable(how) from error

    def ask_or_ask_another(self, frame: bytes, stage: str) -> bytes:
        """Returns the process's reply to a frame, as `ask` does, and starts the process if none runs. If the process is
        lost, asks a second one, because the first may have been killed to free memory for another process."""
        if self.is_running:
            with suppress(SandboxLost):
                return self.ask(frame, stage)
        self.start()
        return self.ask(frame, stage)

    def ask(self, frame: bytes, stage: str) -> bytes:
        """Sends one frame and returns the answer. `stage` names the work in SandboxTimeout. Raises SandboxTimeout,
        SandboxLost, SandboxUnavailable."""
        assert self._child is not None, "start comes first"
        pid, began = self._child.process.pid, time.monotonic()
        before = state_of(pid).cpu_seconds
        try:
            return self._ask(frame, stage)
        finally:
            if self.is_running:
                self.cpu_seconds += state_of(pid).cpu_seconds - before
            else:  # the process is gone, and the kernel's count with it
                self.cpu_seconds += min(time.monotonic() - began, self._timeout)

    def _ask(self, frame: bytes, stage: str) -> bytes:
        assert self._child is not None
        process, line = self._child.process, self._child.line
        patience = Patience(process.pid, line, self._timeout, PATIENCE * self._timeout)
        return self._receive(stage, patience, frame)

    def stop(self, grace_s: float = 0.0) -> None:
        """Kills the process, unless it exits by itself within `grace_s` seconds."""
        child, self._child = self._child, None
        if child is None:
            return
        child.line.close()
        try:
            child.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()

    def _receive(self, stage: str, patience: Patience, frame: bytes | None = None) -> bytes:
        """Sends `frame`, if given, and returns the next frame. On any exception the process is killed."""
        assert self._child is not None
        try:
            if frame is not None:
                send_frame(self._child.line, frame, patience.wait)
            return receive_frame(self._child.line, self._max_reply_bytes, patience.wait)
        except UsedUp as error:
            self.stop()
            raise SandboxTimeout(stage, patience.cpu_seconds) from error
        except Stopped as error:
            self.stop()
            log.warning("%s was stopped, and has been killed", self._name)
            raise SandboxStopped("was stopped") from error
        except Starved as error:
            self.stop()
            raise self._unavailable("got no processor time for its work") from error
        except (EOFError, ConnectionError, ValueError) as error:
            self.stop(LAST_LINES_S)
            raise SandboxDied from error

    def _unavailable(self, how: str) -> SandboxUnavailable:
        log.error("%s %s", self._name, how)
        return SandboxUnavailable(f"{self._name} {how}")
