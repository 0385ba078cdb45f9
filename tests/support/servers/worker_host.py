"""A real `moeserve worker` as a child process, with certificates, for benchmarks and end-to-end tests."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.support.servers.server import READY_S, REPOSITORY, clean_environment, common_flags, imports_from

_READY = re.compile(r"ready: listening at [^,]+, port (\d+)")
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30")


def make_certificates(folder: Path) -> Path:
    """An authority, a worker's certificate for 127.0.0.1 and a server's, as docs/how-to/remote-worker.md makes them."""
    folder.mkdir(parents=True, exist_ok=True)
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=critical,CA:FALSE")
    _request(folder, "ca", "moeserve authority", "-addext", "keyUsage=critical,keyCertSign")
    name = "subjectAltName=IP:127.0.0.1"
    _request(folder, "worker", "worker", *signed, "-addext", name, "-addext", "extendedKeyUsage=serverAuth")
    _request(folder, "server", "server", *signed, "-addext", "extendedKeyUsage=clientAuth")
    return folder


def _request(folder: Path, file: str, name: str, *more: str) -> None:
    files = ("-subj", f"/CN={name}", "-keyout", f"{file}.key", "-out", f"{file}.pem")
    subprocess.run(
        ["openssl", "req", "-x509", *_KEY, *files, *more], cwd=folder, check=True, capture_output=True
    )


def link_flags(certificates: Path, port: int) -> list[str]:
    """Flags of a server whose worker is at this port of 127.0.0.1."""
    files = ("certfile", "server.pem"), ("keyfile", "server.key"), ("ca-certs", "ca.pem")
    tls = [part for flag, file in files for part in (f"--worker-ssl-{flag}", str(certificates / file))]
    return ["--worker", f"127.0.0.1:{port}", *tls]


class WorkerHost:
    """`moeserve worker`, ready when the constructor returns. Raises RuntimeError with its log if it ends before."""

    def __init__(self, model: Path, certificates: Path, *flags: str, ready_timeout: float = READY_S) -> None:
        self._ready_timeout = ready_timeout
        self._log_file = tempfile.NamedTemporaryFile("w+", suffix=".log", prefix="moeserve-")  # noqa: SIM115
        files = ("certfile", "worker.pem"), ("keyfile", "worker.key"), ("ca-certs", "ca.pem")
        tls = [part for flag, file in files for part in (f"--ssl-{flag}", str(certificates / file))]
        self._command = [sys.executable, str(REPOSITORY / "launch.py"), "worker", *common_flags()]
        self._command += ["--model", str(model), *tls, *flags]
        self.port = 0
        self.start()

    def start(self) -> None:
        """Starts it, after a `kill` again at the same port."""
        self._log_file.truncate(0)
        self.process = subprocess.Popen(
            [*self._command, "--listen", f"127.0.0.1:{self.port}"],
            stdin=subprocess.DEVNULL,
            stdout=self._log_file,
            stderr=subprocess.STDOUT,
            env=clean_environment() | imports_from(REPOSITORY),
        )
        self.port = self._wait_until_ready(time.monotonic() + self._ready_timeout)

    @property
    def log(self) -> str:
        return Path(self._log_file.name).read_text(errors="replace")

    def family(self) -> list[psutil.Process]:
        host = psutil.Process(self.process.pid)
        return [host, *host.children(recursive=True)]

    def stop(self) -> int:
        """The exit code. Raises RuntimeError where a process is left."""
        family = self.family()
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(30)
        _, left = psutil.wait_procs(family, timeout=30)
        if left:
            raise RuntimeError(f"processes left {left}:\n{self.log}")
        return code

    def kill(self) -> None:
        """At once; its children die with it."""
        self.process.kill()
        self.process.wait(30)

    def _wait_until_ready(self, deadline: float) -> int:
        while time.monotonic() < deadline and self.process.poll() is None:
            if ready := _READY.search(self.log):
                return int(ready[1])
            time.sleep(0.05)
        self.kill()
        raise RuntimeError(f"the worker was not ready:\n{self.log}")


@contextmanager
def running_worker(
    model: Path, certificates: Path, *flags: str, ready_timeout: float = READY_S
) -> Iterator[WorkerHost]:
    """For the length of a `with`; at its end it has exited with 0."""
    host = WorkerHost(model, certificates, *flags, ready_timeout=ready_timeout)
    try:
        yield host
    except BaseException:
        host.kill()
        raise
    code = host.stop()
    if code != 0:
        raise RuntimeError(f"exit code {code}:\n{host.log}")
