"""A module run as a program of its own, forked from a process that has imported already what takes long.

As `python -m MODULE` otherwise: starting httpserver that way takes a second and more for its imports alone, each time.
"""

from __future__ import annotations

import os
import runpy
import signal
from collections.abc import Mapping
from multiprocessing import get_context
from multiprocessing.reduction import DupFd
from typing import Any

_FORKS = get_context("forkserver")
_FORKS.set_forkserver_preload(["moeserve.httpserver.server", "runpy"])


class ForkedProcess:
    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._process = _FORKS.Process(target=_run, args=(module, dict(environment), _Output()), daemon=True)
        self._process.start()

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
