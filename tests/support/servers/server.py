"""A real moeserve server as a child process, for benchmarks and end-to-end tests."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

REPOSITORY = Path(__file__).resolve().parents[3]
READY_S = 180.0  # a start takes 3 s; ten times that and more on a machine that does other things
READY_ON_GPU_S = 300.0  # the first server compiles kernels
# For tests of programs that set no temperature, and that must print an answer: a sampled one may end at once.
GREEDY = ("--override-generation-config", '{"temperature": 0}')
OF_CHECKOUT = Path(__file__).with_name("of_checkout")  # a sitecustomize.py
_URL = re.compile(r"http://[\w.\[\]:]+:\d+")
_SAMPLE = re.compile(r"^(?P<name>[\w:]+)(?:\{[^}]*\})? (?P<value>\S+)$", re.MULTILINE)


def command(
    model: Path | None, *flags: str, checkout: Path = REPOSITORY, program: Sequence[str] | None = None
) -> list[str]:
    """The command line of a server; no model means the one that ships with moeserve. program: the words before the
    flags; by default this Python and the checkout's launch.py."""
    chosen = [] if model is None else ["--model", str(model)]
    started = [sys.executable, str(checkout / "launch.py")] if program is None else program
    return [*started, *common_flags(), *chosen, *flags]


def common_flags() -> list[str]:
    """Flags of every server that is started here, before its own: $MOESERVE_TEST_DEVICE as --device, then
    $MOESERVE_TEST_FLAGS. The tests set the first (tests/conftest.py)."""
    device = os.environ.get("MOESERVE_TEST_DEVICE")
    more = shlex.split(os.environ.get("MOESERVE_TEST_FLAGS", ""))
    return [*(["--device", device] if device else []), *more]


def clean_environment() -> dict[str, str]:
    """Ours without MOESERVE_*: a flag that someone has set for their own server is not part of a test."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MOESERVE_")}


def imports_from(checkout: Path) -> dict[str, str]:
    """What a process and those it starts need in their environment to run this checkout's moeserve, whichever one their
    Python has an editable install of."""
    return {"PYTHONPATH": f"{checkout.resolve()}{os.pathsep}{OF_CHECKOUT}"}


class Server:
    """`python launch.py` on a free port, ready when the constructor returns.

    Raises RuntimeError with the server's log if it ends, or is not ready within `ready_timeout` seconds (default:
    READY_S, on a GPU READY_ON_GPU_S). `checkout`: the repository whose code runs. `program`: see `command`.
    """

    def __init__(
        self,
        model: Path | None = None,
        *flags: str,
        ready_timeout: float | None = None,
        checkout: Path = REPOSITORY,
        cwd: Path | None = None,
        program: Sequence[str] | None = None,
    ) -> None:
        self._log_file = tempfile.NamedTemporaryFile("w+", suffix=".log", prefix="moeserve-")  # noqa: SIM115
        self.process = subprocess.Popen(
            command(model, "--port", "0", *flags, checkout=checkout, program=program),
            stdin=subprocess.DEVNULL,
            stdout=self._log_file,
            stderr=subprocess.STDOUT,
            env=clean_environment() | imports_from(checkout),
            cwd=cwd,
        )
        self.base_url = ""
        if ready_timeout is None:
            ready_timeout = READY_ON_GPU_S if "cuda" in common_flags() else READY_S
        try:
            self._wait_until_ready(time.monotonic() + ready_timeout)
            self.family = self.processes()
            self.runtime_dir = self._find_runtime_dir()
        except BaseException:
            self.process.terminate()  # the launcher stops what it has started
            self.process.wait(30)
            raise

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        """What the server has written so far, both streams."""
        return Path(self._log_file.name).read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """The launcher and everything that it has started."""
        launcher = psutil.Process(self.pid)
        return [launcher, *launcher.children(recursive=True)]

    def named(self, title: str) -> psutil.Process:
        """The one process with this title, e.g. "worker"."""
        found = []
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):  # one that has just ended, whichever it was
                if title_of(process) == f"moeserve: {title}":
                    found.append(process)
        (one,) = found
        return one

    def metrics(self) -> dict[str, float]:
        """/metrics, summed over the labels of each name."""
        totals: dict[str, float] = {}
        for sample in _SAMPLE.finditer(httpx.get(self.base_url + "/metrics", timeout=30).text):
            totals[sample["name"]] = totals.get(sample["name"], 0.0) + float(sample["value"])
        return totals

    def post(self, path: str, body: dict[str, Any], timeout: float = 60.0) -> dict[str, Any]:
        """Posts JSON and returns the answer's; raises httpx.HTTPStatusError on any other status than 200."""
        response = httpx.post(self.base_url + path, json=body, timeout=timeout)
        if response.status_code != 200:
            raise httpx.HTTPStatusError(response.text, request=response.request, response=response)
        answer: dict[str, Any] = response.json()
        return answer

    def stop(self, timeout: float = 45.0) -> int:
        """SIGTERM to the launcher; returns its exit code. Raises TimeoutExpired after `timeout` seconds."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def survivors(self, grace: float = 2.0) -> list[psutil.Process]:
        """Processes of this server that are still alive after `grace` seconds."""
        psutil.wait_procs(self.family, timeout=grace)
        return [process for process in self.family if _is_alive(process)]

    def kill(self) -> None:
        """The way out when a test has failed: every process at once, and the directory of their sockets."""
        for process in self.family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(30)
        shutil.rmtree(self.runtime_dir, ignore_errors=True)

    def _wait_until_ready(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with code {self.process.returncode}:\n{self.log}")
            url = _URL.search(self.log)
            if url is not None and self._healthy(url[0]):
                self.base_url = url[0]
                return
            time.sleep(0.05)
        raise RuntimeError(f"the server was not ready in time:\n{self.log}")

    @staticmethod
    def _healthy(url: str) -> bool:
        try:
            return httpx.get(url + "/health", timeout=30).status_code == 200
        except httpx.TransportError:
            return False

    def _find_runtime_dir(self) -> Path:
        """From the sockets: a process that names itself may overwrite what /proc shows of its environment."""
        for process in self.family:
            for socket in process.net_connections(kind="unix"):
                if Path(str(socket.laddr)).name == "launcher":
                    return Path(str(socket.laddr)).parent
        raise RuntimeError("no process listens on the launcher's socket")


def title_of(process: psutil.Process) -> str:
    """What `ps` shows of a process: the title that it gave itself, or its command line."""
    return " ".join(process.cmdline()).rstrip()


@contextmanager
def running_server(
    model: Path | None = None,
    *flags: str,
    ready_timeout: float | None = None,
    checkout: Path = REPOSITORY,
) -> Iterator[Server]:
    """A server for the length of a `with`; at its end it has exited with 0 and left no process behind.

    Raises RuntimeError when it did not. When the body raises, the server is killed.
    """
    server = Server(model, *flags, ready_timeout=ready_timeout, checkout=checkout)
    try:
        yield server
    except BaseException:
        server.kill()
        raise
    try:
        code = server.stop()
    except subprocess.TimeoutExpired:
        log = server.log
        server.kill()
        raise RuntimeError(f"the server did not stop after SIGTERM:\n{log}") from None
    left = server.survivors()
    if code != 0 or left:
        server.kill()
        raise RuntimeError(f"exit code {code}, processes left {left}:\n{server.log}")


def stream_events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event, up to [DONE]."""
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[len("data: ") :])


def _is_alive(process: psutil.Process) -> bool:
    """A process that has ended and waits for an init that takes its status is not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
