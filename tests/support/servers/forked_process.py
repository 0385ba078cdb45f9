"""A module run as a program of its own, forked from a process that has imported already what takes long.

As `python -m MODULE` otherwise: starting httpserver that way takes a second and more for its imports alone, each time.
A fork parent that hangs is given up, and the module is started that way.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import forkserver, get_context
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from threading import Thread
from typing import Any, Final

FIRST_FORK_S: Final = 60.0  # it waits for imports
FORK_S: Final = 10.0

_FORKS = get_context("forkserver")
_FORKS.set_forkserver_preload(["moeserve.httpserver.server", "tests.support.servers.built_bodies", "runpy"])


class ForkedProcess:
    def __init__(self, module: str, environment: Mapping[str, str], fork_s: float = FORK_S) -> None:
        """fork_s: seconds after which a fork parent that has forked before is given up."""
        forked = _FORKS.Process(target=_run, args=(module, dict(environment), _Output()), daemon=True)
        self._process: BaseProcess | _OrdinaryProcess
        self._process = forked if _starts(forked, fork_s) else _OrdinaryProcess(module, environment)

    @property
    def is_forked(self) -> bool:
        return not isinstance(self._process, _OrdinaryProcess)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, signum: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        """The exit code, or minus the signal. Raises TimeoutError."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self.pid} still runs")
        return self._process.exitcode


class _OrdinaryProcess:
    """Its own interpreter's `python -m MODULE`, with what ForkedProcess uses of a BaseProcess."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._popen = subprocess.Popen([sys.executable, "-m", module], env={**environment, **path})
        self.pid = self._popen.pid

    @property
    def exitcode(self) -> int | None:
        return self._popen.poll()

    def join(self, timeout: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout)


def fork_parent() -> int | None:
    """The process id of the one that forks; None before the first."""
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid


def _starts(process: BaseProcess, fork_s: float) -> bool:
    """Starts it. False, with the fork parent killed, when that takes too long; the next call has another parent."""
    global _has_forked

    def start() -> None:
        with suppress(EOFError, OSError):  # the parent was killed
            process.start()

    starting = Thread(target=start, daemon=True)
    starting.start()
    starting.join(fork_s if _has_forked else FIRST_FORK_S)
    if process.ident is None:
        _has_forked = False
        if (parent := fork_parent()) is not None:
            os.kill(parent, signal.SIGKILL)
        starting.join()
        return False
    _has_forked = True
    return True


_has_forked = False


class _Output:
    """Standard output and error as they are where this is made: pytest may redirect them for one test."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _take_output, (DupFd(1), DupFd(2))


def _take_output(*outputs: Any) -> None:
    for target, output in enumerate(outputs, start=1):
        descriptor = output.detach()
        os.dup2(descriptor, target)
        os.close(descriptor)


def _run(module: str, environment: dict[str, str], output: None) -> None:
    os.environ.clear()
    os.environ.update(environment)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
