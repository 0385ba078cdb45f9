"""Set-up and tear-down that all child processes share.

`python -m moeserve.<name>` calls `run_process(name, main)`. The child finds its runtime directory in
MOESERVE_RUNTIME_DIR, reads the configuration that the launcher wrote there, sets its process name, and tells the
launcher when it is ready or why it failed.
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
# limited by --max-process-memory; the worker's memory is planned instead
BOUNDED = ("httpserver", "router", "detokenizer")

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

log = logging.getLogger(__name__)


class Process:
    """A child process's context: its configuration, its socket addresses and its connection to the launcher."""

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
        """Opens the ZeroMQ context and the socket to the launcher. A fork calls it again: sockets are closed before
        a fork because a context has threads."""
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._launcher = PushChannel(self.context, self.paths.launcher)

    def close_sockets(self) -> None:
        """Closes all sockets of `context`, after a bounded wait for the last messages to be sent."""
        self._launcher.close()
        self.context.destroy()

    def ready(self, *, url: str | None = None, engine: WorkerReady | None = None) -> None:
        """Tells the launcher that this process is ready, and from now on bounds its memory if --max-process-memory says
        so for this process. Call it once, with every socket bound. httpserver passes its URL, the worker what it has
        allocated."""
        self.is_ready = True
        if self.name in BOUNDED and self.config.max_process_memory is not None:
            bound_memory(int(self.config.max_process_memory * GIB))
        self._launcher.send(ProcessReady(process=self.name, pid=os.getpid(), url=url, engine=engine))
        log.debug("ready")

    def heartbeat(self) -> None:
        """Answers a HeartbeatRequest of the launcher."""
        self.launcher.asked()
        self._launcher.send(Heartbeat(self.name))

    def failed(self, message: str) -> None:
        self._launcher.send(ProcessFailed(process=self.name, message=message))

    @property
    def first_request_id(self) -> int:
        """Returns the first request id that httpserver may use. Smaller ids belong to a previous httpserver that
        died."""
        return int(os.environ.get(FIRST_REQUEST_ENV, "1"))

    @property
    def listens_when_ready(self) -> bool:
        """Returns True if httpserver must not accept connections before the engine is ready, because another server
        still does."""
        return LISTEN_WHEN_READY_ENV in os.environ

    @functools.cached_property
    def tracer(self) -> Tracer | None:
        """This process's tracer; None if tracing is off."""
        return open_tracer(self.name, self.config)

    def close(self) -> None:
        """Closes the tracer and the sockets, after a bounded wait for the last spans to be sent."""
        if (tracer := self.__dict__.get("tracer")) is not None:  # only if `tracer` was used
            tracer.close()
        self.close_sockets()


def python_environment() -> dict[str, str]:
    """Returns the environment variables for a child process that must import the same moeserve. Start the child with
    -P: an empty PYTHONPATH entry, which would mean the working directory, is left out as well."""
    environment = dict(os.environ)
    ours = Path(moeserve.__file__).resolve().parents[1]
    entries = [entry for entry in environment.pop("PYTHONPATH", "").split(os.pathsep) if entry]
    if ours.name not in ("site-packages", "dist-packages"):
        # Only for a checkout: a child finds site-packages by itself, and PYTHONPATH would put them before the standard
        # library.
        entries.insert(0, str(ours))
    if entries:
        environment["PYTHONPATH"] = os.pathsep.join(entries)
    return environment


def run_process(name: str, main: Callable[[Process], None]) -> NoReturn:
    """Runs `main` as the process `name` and exits. Exit code 0: `main` returned. 2: an error that the user can act
    on (a UserError at any time; before `ready()` also an OSError, such as a port in use, and MemoryError). 1: a bug,
    with its traceback in the log. The launcher receives the message as ProcessFailed."""
    _leave_signals_to_launcher()
    if LAUNCHER_PID_ENV in os.environ:
        die_with(int(os.environ[LAUNCHER_PID_ENV]))
    faulthandler.enable()  # a crash in C++ logs the Python stack
    setproctitle(f"moeserve: {name}")
    paths = RuntimePaths.from_env()
    config = load_config(paths)
    set_up_logging(name, config.log_level, config.log_format)
    process = Process(name, config, paths)
    code = guarded(process, main)
    process.close()
    end_at_once(code)


def end_at_once(code: int) -> NoReturn:
    """Ends this process without the interpreter's own clean-up, which would free all modules and an engine's memory
    piece by piece; the kernel frees them at once."""
    atexit._run_exitfuncs()  # includes that of logging
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def guarded(process: Process, main: Callable[[Process], None]) -> int:
    """Runs `main` and converts an exception into a log message and an exit code."""
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
    """Returns the configuration that the launcher wrote, checking the type of every field. Raises ConfigError for a
    file that is missing, damaged, or has unknown fields."""
    try:
        raw: dict[str, Any] = msgspec.json.decode(paths.config_file.read_bytes(), type=dict[str, Any])
        unknown = raw.keys() - ServerConfig.__dataclass_fields__.keys()
        if unknown:
            raise ConfigError(f"{paths.config_file}: unknown fields {sorted(unknown)}")
        return msgspec.convert(raw, ServerConfig)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{paths.config_file}: {error}") from error


def _leave_signals_to_launcher() -> None:
    """Makes this process ignore SIGINT, SIGTERM and SIGHUP. Ctrl-C signals the whole process group and systemd the
    whole control group, but requests can only drain if the inner processes outlive httpserver. httpserver later
    installs its own handlers for SIGTERM and SIGHUP."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)


def line_to_launcher() -> socket.socket | None:
    """Returns the socket to the launcher (standard input) of a process that forks others; None if the launcher
    passed none, or if a test started the process."""
    return socket.socket(fileno=0) if stat.S_ISSOCK(os.fstat(0).st_mode) else None


def die_with(parent: int) -> None:
    """Asks the kernel to kill this process when its parent dies, so that no orphan keeps the model in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(EXIT_BUG)  # the parent died before the call above took effect
