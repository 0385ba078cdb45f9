"""A launcher with real processes, sockets and signals, whose children are stand-ins."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.servers.waiting import until

REPOSITORY = Path(__file__).resolve().parents[3]
LAUNCH = """
import os
import sys
from moeserve.config import ServerConfig
from moeserve.launcher import crash_count, launch, standstill, zygote
from moeserve.processes.logs import set_up_logging
port, timeout, step_timeout, crash_count.WINDOW_S = int(sys.argv[1]), *map(float, sys.argv[2:])
config = ServerConfig(
    model="tiny.gguf", port=port, shutdown_timeout=timeout, step_timeout=step_timeout, api_key=("secret",)
)
if "hang" in os.environ["LAUNCHER_TEST"]:  # others, which a busy machine slows down, are given the usual time
    launch.EXIT_TIMEOUT_S = standstill.STILL_S = 3.0
zygote.SETTLED_S = 0.1
set_up_logging("launcher", config.log_level)
sys.exit(launch.launch(config, "tests.support.servers.launcher_children"))
"""


def _heed_signals() -> None:
    """In the child, which would ignore what the tests ignore: a background job ignores SIGINT, under nohup SIGHUP."""
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)


class Run:
    """A launcher with stand-in children; `family` is all its processes once it is ready."""

    def __init__(
        self,
        tmp_path: Path,
        runtime_base: Path,
        misbehaviour: str,
        port: int,
        timeout: float,
        nohup: bool,
        step_timeout: float,
        crash_window: float,
    ) -> None:
        self.log_file = tmp_path / "log"
        self.runtime_base = runtime_base
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MOESERVE_")}
        environment |= {
            "XDG_RUNTIME_DIR": str(self.runtime_base),
            "LAUNCHER_TEST": misbehaviour,
            "PYTHONPATH": str(REPOSITORY),
        }
        with self.log_file.open("wb") as log:
            self.popen = subprocess.Popen(
                [
                    *(["nohup"] if nohup else []),
                    sys.executable,
                    "-c",
                    LAUNCH,
                    *map(str, (port, timeout, step_timeout, crash_window)),
                ],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=tmp_path,
                preexec_fn=_heed_signals,
            )
        self.family: list[psutil.Process] = []
        self.titles: dict[str, psutil.Process] = {}

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def wait_for(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        until(condition, seconds, lambda: self.log)

    def wait_for_log(self, text: str) -> None:
        self.wait_for(lambda: text in self.log)

    def until_ready(self) -> Run:
        self.wait_for_log("ready: ")
        launcher = psutil.Process(self.popen.pid)
        self.family = [launcher, *launcher.children(recursive=True)]
        self.titles = {}
        for process in self.family:
            with suppress(psutil.NoSuchProcess):  # one that was killed while starting may not be reaped yet
                self.titles[process.cmdline()[0]] = process
        return self

    def child(self, name: str) -> psutil.Process:
        return self.titles[f"moeserve: {name}"]

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        host, port = re.findall(r"ready: http://([\d.]+):(\d+)", self.log)[0]
        return host, int(port)

    @property
    def directory(self) -> Path:
        (directory,) = self.runtime_base.iterdir()
        return directory

    def end(self, seconds: float = 60.0) -> int:
        """Waits for the exit; then no process, socket or directory may be left."""
        code = self.popen.wait(seconds)
        _, alive = psutil.wait_procs(self.family, timeout=30)
        assert alive == [], self.log
        assert list(self.runtime_base.iterdir()) == [], self.log
        return code
