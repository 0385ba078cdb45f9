"""What every child process does before and around its own work.

`python -m moeserve.<name>` calls `run_process(name, main)`. The child finds its runtime directory in
MOESERVE_RUNTIME_DIR, reads the configuration the launcher wrote there, names itself, and tells the launcher
when it is ready or why it failed.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import functools
import logging
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import zmq
from setproctitle import setproctitle

import moeserve
from moeserve.config import ENV_PREFIX, LAUNCHER_PID_ENV, ServerConfig
from moeserve.config.units import GIB
from moeserve.errors import ConfigError, UserError
from moeserve.messages.channels import PushChannel
from moeserve.messages.schema import Heartbeat, ProcessFailed, ProcessReady
from moeserve.messages.steps import WorkerReady
from moeserve.processes.limits import bound_memory
from moeserve.processes.logs import set_up_logging
from moeserve.processes.runtime_paths import RuntimePaths
from moeserve.processes.silence import LauncherWatch, longest_silence
from moeserve.processes.tracing import Tracer, open_tracer

LISTEN_WHEN_READY_ENV = ENV_PREFIX + "LISTEN_WHEN_READY"
FIRST_REQUEST_ENV = ENV_PREFIX + "FIRST_REQUEST_ID"
EXIT_USER_ERROR = 2
EXIT_BUG = 1
BOUNDED = ("httpserver", "router", "detokenizer")  # by --max-process-memory; the worker's memory is planned

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

log = logging.getLogger(__name__)


class Process:
    """A child's surroundings: its configuration, its sockets' addresses and the line to the launcher."""

    def __init__(self, name: str, config: ServerConfig, paths: RuntimePaths) -> None:
        self.name = name
        self.config = config
        self.paths = paths
        self.is_ready = False
        launcher = os.environ.get(LAUNCHER_PID_ENV)
        self.launcher = LauncherWatch(
            None if launcher is None else int(launcher), longest_silence(config.step_timeout)
        )
        self.open_sockets()

    def open_sockets(self) -> None:
        """Also in a fork: sockets must be closed before one, because a context has threads."""
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._launcher = PushChannel(self.context, self.paths.launcher)

    def close_sockets(self) -> None:
        """Waits, a bounded time, for the last messages to leave; then every socket of `context` is closed."""
        self._launcher.close()
        self.context.destroy()

    def ready(self, *, url: str | None = None, engine: WorkerReady | None = None) -> None:
        """Tell the launcher that this process can do its work: call it once, with every socket bound.
        httpserver tells its URL, the worker what it has allocated."""
        self.is_ready = True
        if self.name in BOUNDED and self.config.max_process_memory is not None:
            bound_memory(int(self.config.max_process_memory * GIB))
        self._launcher.send(ProcessReady(process=self.name, pid=os.getpid(), url=url, engine=engine))
        log.debug("ready")

    def heartbeat(self) -> None:
        """Answers a HeartbeatRequest."""
        self.launcher.asked()
        self._launcher.send(Heartbeat(self.name))

    def failed(self, message: str) -> None:
        self._launcher.send(ProcessFailed(process=self.name, message=message))

    @property
    def first_request_id(self) -> int:
        """For httpserver: below are the ids of one that was lost."""
        return int(os.environ.get(FIRST_REQUEST_ENV, "1"))

    @property
    def listens_when_ready(self) -> bool:
        """For httpserver: another server accepts until the engine is ready."""
        return LISTEN_WHEN_READY_ENV in os.environ

    @functools.cached_property
    def tracer(self) -> Tracer | None:
        """Where this process's spans go; None: nowhere. For the processes that have some."""
        return open_tracer(self.name, self.config)

    def close(self) -> None:
        """Also waits, a bounded time, for the last spans to leave."""
        if (tracer := self.__dict__.get("tracer")) is not None:  # made by somebody
            tracer.close()
        self.close_sockets()


def python_environment() -> dict[str, str]:
    """That of a child that runs the same moeserve as we do. Start it with -P: nothing of the working directory is on
    its path, for which an empty entry of PYTHONPATH stands, too."""
    environment = dict(os.environ)
    ours = Path(moeserve.__file__).resolve().parents[1]
    entries = [entry for entry in environment.pop("PYTHONPATH", "").split(os.pathsep) if entry]
    if ours.name not in ("site-packages", "dist-packages"):
        # A checkout. (Site-packages it finds by itself, and PYTHONPATH would put them before the standard library.)
        entries.insert(0, str(ours))
    if entries:
        environment["PYTHONPATH"] = os.pathsep.join(entries)
    return environment


def run_process(name: str, main: Callable[[Process], None]) -> NoReturn:
    """Runs `main` as the process `name` and exits: 0 when it returns, 2 after an error the user can act on
    (a UserError at any time; an OSError, such as a port in use, or too little memory before `ready()`), 1
    after a bug, with its traceback in the log. The launcher gets the message as ProcessFailed."""
    _leave_signals_to_launcher()
    if LAUNCHER_PID_ENV in os.environ:
        die_with(int(os.environ[LAUNCHER_PID_ENV]))
    faulthandler.enable()  # a crash in C++ leaves the Python calls that led there in the log
    setproctitle(f"moeserve: {name}")
    paths = RuntimePaths.from_env()
    config = load_config(paths)
    set_up_logging(name, config.log_level, config.log_format)
    process = Process(name, config, paths)
    code = guarded(process, main)
    process.close()
    end_at_once(code)


def end_at_once(code: int) -> NoReturn:
    """Ends this process: the interpreter's own way out takes apart all that was imported, and an engine's memory piece
    by piece, which the kernel does in one go."""
    atexit._run_exitfuncs()  # logging's too, which is one
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def guarded(process: Process, main: Callable[[Process], None]) -> int:
    """The border where an exception becomes a message and an exit code."""
    try:
        main(process)
    except UserError as error:
        process.failed(str(error))
        return EXIT_USER_ERROR
    except Exception as error:
        starting = not process.is_ready
        if starting and isinstance(error, OSError | MemoryError):
            process.failed(str(error) or "out of memory")
            return EXIT_USER_ERROR
        log.exception("failed")
        process.failed(f"{type(error).__name__}: {error}")
        return EXIT_BUG
    return 0


def load_config(paths: RuntimePaths) -> ServerConfig:
    """The configuration the launcher wrote, with every field's type checked. Raises ConfigError."""
    try:
        raw: dict[str, Any] = msgspec.json.decode(paths.config_file.read_bytes(), type=dict[str, Any])
        unknown = raw.keys() - ServerConfig.__dataclass_fields__.keys()
        if unknown:
            raise ConfigError(f"{paths.config_file}: unknown fields {sorted(unknown)}")
        return msgspec.convert(raw, ServerConfig)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{paths.config_file}: {error}") from error


def _leave_signals_to_launcher() -> None:
    """Ctrl-C reaches a whole process group and systemd's stop a whole control group, but requests drain only
    if the inner processes outlive httpserver. So children ignore them; httpserver then installs handlers of its
    own for SIGTERM and SIGHUP."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)


def line_to_launcher() -> socket.socket | None:
    """Standard input, for a process that forks others. None where the launcher has given no line, as where a test
    starts a worker by itself."""
    return socket.socket(fileno=0) if stat.S_ISSOCK(os.fstat(0).st_mode) else None


def die_with(parent: int) -> None:
    """The kernel kills us when our parent goes, however it goes: no orphan holds the model's memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(EXIT_BUG)  # it died before the call above took effect
