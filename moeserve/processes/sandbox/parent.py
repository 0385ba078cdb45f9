"""The parent's side of a sandboxed process: start it, ask it, kill it when it does not answer in time."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from .frames import receive_frame, send_frame
from .line import FairLine

T = TypeVar("T")

_SHORTEST_WAIT = 0.01  # seconds, as exact as the kernel counts CPU time

# By the clock a question may take so many times its limit of CPU time: a busy machine may make it so much slower.
PATIENCE = 10
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
    """The process did not answer in time and was killed. `stage` is "start", or what `ask` was given; `seconds` are
    those of CPU time that it had, or of wall-clock time where the machine did not give it as many."""

    def __init__(self, stage: str, seconds: float) -> None:
        super().__init__(f"did not {stage} within {seconds:g} s and was stopped")
        self.stage = stage
        self.seconds = seconds


class SandboxDied(Exception):
    """The process ended unexpectedly: it ran out of memory, most likely."""


@dataclass(frozen=True, slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    channel: socket.socket


class Sandbox:
    """One process at a time, `python -m <module>`, one question at a time; other questions wait in line, in which
    tenants take turns.

    All that blocks runs on one thread, which also starts the process and which the process dies with. After a
    time-out or a death the next question starts a new process.
    """

    def __init__(
        self, module: str, *, timeout: float, max_reply_bytes: int, arguments: Sequence[str] = ()
    ) -> None:
        """`timeout` is seconds of CPU time for each question, which may take PATIENCE times as long by the clock.
        Starts nothing yet."""
        self._command = [sys.executable, "-m", module, *arguments]
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
        """Starts the process and waits for its first frame. SandboxTimeout, SandboxDied."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                self._command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _PASSED_ENVIRONMENT if name in os.environ},
            )
        self._child = _Child(process, ours)
        self._receive("start", START_SECONDS, START_SECONDS)

    def ask(self, frame: bytes, stage: str) -> bytes:
        """The answer to one frame; `stage` names the work for SandboxTimeout. SandboxDied."""
        assert self._child is not None, "start comes first"
        child, began, before = self._child, time.monotonic(), _cpu_time(self._child)
        try:
            return self._ask(frame, stage)
        finally:
            if self.is_running:
                self.cpu_seconds += _cpu_time(child) - before
            else:  # the kernel's count is gone with it
                self.cpu_seconds += min(time.monotonic() - began, self._timeout)

    def _ask(self, frame: bytes, stage: str) -> bytes:
        assert self._child is not None
        wall_seconds = PATIENCE * self._timeout
        try:
            send_frame(self._child.channel, frame, time.monotonic() + wall_seconds)
        except TimeoutError as error:
            self.stop()
            raise SandboxTimeout(stage, wall_seconds) from error
        except ConnectionError as error:
            self.stop()
            raise SandboxDied from error
        return self._receive(stage, self._timeout, wall_seconds)

    def stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.channel.close()
            child.process.kill()
            child.process.wait()

    def _receive(self, stage: str, cpu_seconds: float, wall_seconds: float) -> bytes:
        assert self._child is not None
        deadline = time.monotonic() + wall_seconds
        try:
            if not _answers(self._child, cpu_seconds, deadline):
                self.stop()
                raise SandboxTimeout(stage, cpu_seconds)
            return receive_frame(self._child.channel, self._max_reply_bytes, deadline)
        except TimeoutError as error:
            self.stop()
            raise SandboxTimeout(stage, wall_seconds) from error
        except (EOFError, ConnectionError, ValueError) as error:
            self.stop()
            raise SandboxDied from error


def _answers(child: _Child, cpu_seconds: float, deadline: float) -> bool:
    """Waits until the process answers or ends; False once it has computed for `cpu_seconds`. TimeoutError after
    `deadline` (time.monotonic)."""
    answer = select.poll()
    answer.register(child.channel, select.POLLIN)
    limit = _cpu_time(child) + cpu_seconds
    left = cpu_seconds
    while not answer.poll(1000 * max(min(left, deadline - time.monotonic()), _SHORTEST_WAIT)):
        left = limit - _cpu_time(child)
        if left <= 0:
            return False
        if time.monotonic() >= deadline:
            raise TimeoutError
    return True


def _cpu_time(child: _Child) -> float:
    """Seconds that the process has computed, in all of its threads (proc(5), /proc/PID/stat); 0 where it has ended and
    was waited for, as its channel says next."""
    try:
        with open(f"/proc/{child.process.pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
