"""The parent's side of a sandboxed process: start it, ask it, kill it when it does not answer in time."""

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
from dataclasses import dataclass
from typing import TypeVar

from moeserve.errors import UserError
from moeserve.processes.process_state import state_of

from .frames import receive_frame, send_frame
from .line import FairLine
from .patience import Patience, Starved, Stopped, UsedUp

T = TypeVar("T")

log = logging.getLogger(__name__)

# By the clock a question may take this multiple of its limit of CPU time: a busy machine may make it so much slower.
PATIENCE = 10
LAST_LINES_S = 2.0  # for a process that has closed its line to say why, and end
START_SECONDS = 60.0  # until the process runs, before it has met its work: a cold disk, a busy machine
# The process gets no more of the environment than Python needs to start: it might hold the API key.
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
    """The process computed for too long and was killed. `stage` is what `ask` was given; `seconds` are those of CPU
    time that it had."""

    def __init__(self, stage: str, seconds: float) -> None:
        super().__init__(f"did not {stage} within {seconds:g} s and was stopped")
        self.stage = stage
        self.seconds = seconds


class SandboxLost(Exception):
    """There is no process any more; another one may be asked the same."""


class SandboxDied(SandboxLost):
    """The process ended unexpectedly: it ran out of memory, most likely."""


class SandboxStopped(SandboxLost):
    """The process had been stopped from outside, and was killed."""


class SandboxUnavailable(UserError):
    """No process can do the work at the moment, which is no fault of the work."""


@dataclass(frozen=True, slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    line: socket.socket


class Sandbox:
    """One process at a time, `python -m <module>`, one question at a time; other questions wait in line, in which
    tenants take turns.

    All that blocks runs on one thread, which also starts the process and which the process dies with. After a
    time-out or a death the next question starts a new process.
    """

    def __init__(
        self, module: str, work: str, *, timeout: float, max_reply_bytes: int, arguments: Sequence[str] = ()
    ) -> None:
        """`work` says in messages what the process is for. `timeout` is seconds of CPU time for each question, which
        may take PATIENCE times as long by the clock. Starts nothing yet."""
        # -P: a file in the current directory must not stand in for a module.
        self._command = [sys.executable, "-P", "-m", module, *arguments]
        self._name = f"the process for {work}"
        self._timeout = timeout
        self._max_reply_bytes = max_reply_bytes
        self._child: _Child | None = None
        # Of the answers so far, those that never came included; the kernel counts 10 ms.
        self.cpu_seconds = 0.0
        self._line = FairLine()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=module.rpartition(".")[2])

    async def run(self, work: Callable[[], T], tenant: str = "") -> T:
        """`work()` on the sandbox's thread, where `start`, `ask` and `stop` belong."""
        async with self._line.turn(tenant):
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def run_sync(self, work: Callable[[], T]) -> T:
        """As `run`, blocking: not for an event loop's thread."""
        return self._thread.submit(work).result()

    def close(self) -> None:
        """Ends the process. Waits for a question that is being answered."""
        self.run_sync(self.stop)
        self._thread.shutdown()

    # ---- all below runs on the sandbox's thread

    @property
    def is_running(self) -> bool:
        return self._child is not None

    def start(self) -> None:
        """Starts the process and waits for its first frame. SandboxUnavailable."""
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
            self._receive("start", Patience(process.pid, ours, START_SECONDS, START_SECONDS))
        except (SandboxTimeout, SandboxLost) as error:
            how = str(error) or f"ended at once (exit code {child.process.returncode}): its own lines say why"
            raise self._unavailable(how) from error

    def ask(self, frame: bytes, stage: str) -> bytes:
        """The answer to one frame; `stage` names the work for SandboxTimeout. SandboxLost, SandboxUnavailable."""
        assert self._child is not None, "start comes first"
        pid, began = self._child.process.pid, time.monotonic()
        before = state_of(pid).cpu_seconds
        try:
            return self._ask(frame, stage)
        finally:
            if self.is_running:
                self.cpu_seconds += state_of(pid).cpu_seconds - before
            else:  # the kernel's count is gone with it
                self.cpu_seconds += min(time.monotonic() - began, self._timeout)

    def _ask(self, frame: bytes, stage: str) -> bytes:
        assert self._child is not None
        process, line = self._child.process, self._child.line
        patience = Patience(process.pid, line, self._timeout, PATIENCE * self._timeout)
        return self._receive(stage, patience, frame)

    def stop(self, grace_s: float = 0.0) -> None:
        """Ends the process, unless it ends by itself within `grace_s` seconds."""
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
        """The next frame, which `frame` asks for. The process is gone where it raises anything."""
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
