"""`moeserve worker`: keeps a worker alive on this machine, with a gate in front of it.

The worker, and the keeper process that holds its weights, are the same as in a local server. If one crashes, another is
started and the router is told, which then continues its requests. If a router is lost, the next one binds every
sequence anew.
"""

from __future__ import annotations

import logging
import math
import signal
import socket
import ssl
import time
from contextlib import ExitStack, suppress
from types import FrameType
from typing import Final

import zmq

from moeserve import __version__
from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.launcher.child_process import Fork, ServerProcess
from moeserve.launcher.crash_count import CrashCount
from moeserve.launcher.exit_codes import EXIT_ENGINE_LOST, EXIT_FAILED, EXIT_STOPPED
from moeserve.launcher.launch import LAST_WORDS_S
from moeserve.launcher.launched_config import pinned, write_config
from moeserve.launcher.process_table import WORKER, ProcessTable
from moeserve.launcher.signal_events import signals_as_events
from moeserve.launcher.signs_of_life import SignsOfLife
from moeserve.launcher.systemd import Systemd
from moeserve.messages.channels import PullChannel
from moeserve.messages.codec import TO_HTTP, TO_LAUNCHER
from moeserve.messages.schema import ProcessFailed, ProcessReady, ToHttp, ToLauncher
from moeserve.messages.steps import WorkerReady
from moeserve.processes.lifecycle import EXIT_USER_ERROR
from moeserve.processes.runtime_paths import RuntimePaths
from moeserve.processes.silence import longest_silence
from moeserve.remote.frames import Welcome
from moeserve.remote.gate import Gate, NotServing

PACKAGE: Final = "moeserve.remote"
LOOK_S: Final = 0.5  # seconds between two checks of a worker that must report progress
HANG_S: Final = 30.0  # seconds for the step that a lost router has left running, unless --step-timeout is set

log = logging.getLogger(__name__)


class WorkerHost:
    """Runs one `moeserve worker`. Only the main thread uses it, and sleeps between events."""

    def __init__(
        self,
        config: ServerConfig,
        fingerprint: str,
        listener: socket.socket,
        context: ssl.SSLContext,
        paths: RuntimePaths,
        stack: ExitStack,
    ) -> None:
        """context: of `tls.gate_context`. stack: closes what is opened here."""
        self._config = config
        self._fingerprint = fingerprint
        self._paths = paths
        self._signals = 0
        self._systemd = Systemd.from_env()
        self._engine: WorkerReady | None = None  # None until the worker is ready
        self._ready: set[str] = set()  # the worker, where it is
        self._first: WorkerReady | None = None
        self._last_words = ""
        self._busy_since: float | None = None  # a router was lost, and the worker does not listen again yet
        self._crashes = CrashCount(config.max_engine_crashes)
        zmq_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(zmq_context.destroy, linger=0)
        write_config(config, paths)
        self._inbox: PullChannel[ToLauncher] = PullChannel(zmq_context, paths.launcher, TO_LAUNCHER)
        self._news: PullChannel[ToHttp] = PullChannel(zmq_context, paths.http, TO_HTTP)  # for httpservers
        self._wakeup = stack.enter_context(signals_as_events(self._on_signal))
        self._poller = zmq.Poller()
        for source in (self._inbox.socket, self._news.socket, self._wakeup.fileno()):
            self._poller.register(source, zmq.POLLIN)
        self._processes = ProcessTable(PACKAGE, paths, self._poller)
        self._signs_of_life = SignsOfLife(longest_silence(config.step_timeout), self._processes, self._ready)
        self._listener = listener
        self._gate = Gate(listener, context, self._poller, self._open_worker)
        stack.callback(self._gate.close)

    def run(self) -> int:
        """Serves until it is stopped or fails. Returns the exit code; by then all child processes have ended."""
        try:
            self._processes.start(WORKER)
            while not self._signals:
                self._sleep()
                if not self._worker_is_kept():
                    return EXIT_FAILED if self._first is None else EXIT_ENGINE_LOST
            log.info("stopping")
            self._gate.worker_lost("the worker is stopped", by_itself=False)
            self._systemd.notify("STOPPING=1")
            return EXIT_STOPPED
        finally:
            self._processes.kill_all()

    def _sleep(self) -> None:
        """Waits for events, and handles them."""
        now = time.monotonic()
        due = [self._gate.due, now + self._signs_of_life.interval_s]
        if self._busy_since is not None:
            due.append(now + LOOK_S)
        if self._systemd.interval_s is not None:
            due.append(now + self._systemd.interval_s)
        woken_by = dict(self._poller.poll(max(math.ceil((min(due) - now) * 1e3), 0)))
        self._systemd.still_alive()
        self._processes.woken_by(woken_by)
        with suppress(BlockingIOError):
            self._wakeup.recv(64)
        self._signs_of_life.turn()
        self._news.drain()
        for message in self._inbox.drain():
            if isinstance(message, ProcessReady) and message.engine is not None:
                self._is_ready(message.engine)
            elif isinstance(message, ProcessFailed):
                self._last_words = message.message
        served = self._gate.is_serving
        self._gate.turn()
        if served and not self._gate.is_serving:
            self._busy_since = time.monotonic()

    def _is_ready(self, engine: WorkerReady) -> None:
        self._engine = engine
        self._ready.add(WORKER)
        self._busy_since = None
        if self._first is None:
            self._first = engine
            write_config(pinned(self._config, engine), self._paths)
            host, port = self._listener.getsockname()[:2]
            self._systemd.notify("READY=1")
            log.info(
                "ready: listening at %s, port %d; memory used %.2f GiB, %d KV tokens available, %s",
                *(host, port, self._processes.memory_used() / GIB, engine.num_kv_slots, engine.device),
            )
        elif self._crashes:
            log.info("the worker is back after %.2f s", self._crashes.since_last_s)

    def _open_worker(self) -> tuple[Welcome, socket.socket]:
        """Connects to the worker for the gate. Raises NotServing."""
        if self._engine is None:
            raise NotServing("the worker is loading its model")
        local = socket.socket(socket.AF_UNIX)
        try:
            local.connect(str(self._paths.worker))
        except OSError as error:
            local.close()
            raise NotServing("the worker is still computing a step of the previous router") from error
        self._busy_since = None
        return Welcome(__version__, self._fingerprint, self._engine), local

    def _worker_is_kept(self) -> bool:
        """Starts another worker if one has died. Returns False if there is no point in another."""
        worker = self._processes[WORKER]
        if self._busy_since is not None:
            limit = self._config.step_timeout or HANG_S
            if self._paths.worker.exists():
                self._busy_since = None
            elif time.monotonic() - self._busy_since >= limit:
                worker.give_up("the worker does not answer")
        dead = self._processes.dead()
        if not dead:
            return True
        if isinstance(worker, Fork):
            self._processes.end_with_keeper(worker)
        cause, by_itself = self._cause(worker), worker.died_by_itself
        log.error("the worker died: %s", cause)
        self._gate.worker_lost(cause, by_itself=by_itself)
        if (self._engine is None and worker.returncode == EXIT_USER_ERROR) or not self._may_try_again():
            return False
        self._engine, self._last_words, self._busy_since = None, "", None
        self._ready.clear()
        self._paths.worker.unlink(missing_ok=True)
        self._processes.replace_worker()
        return True

    def _cause(self, worker: ServerProcess) -> str:
        """Returns why the worker ended. Unless it was killed, waits briefly for the worker's own message."""
        deadline = time.monotonic() + LAST_WORDS_S
        while (worker.returncode or 0) > 0 and not self._last_words and time.monotonic() < deadline:
            message = self._inbox.recv(LAST_WORDS_S)
            if isinstance(message, ProcessFailed):
                self._last_words = message.message
        cause = worker.cause_of_death()
        return f"{cause}: {self._last_words}" if self._last_words else cause

    def _may_try_again(self) -> bool:
        too_often = self._crashes.add(WORKER, was_ready=self._engine is not None)
        if self._first is None:
            return False
        if too_often is not None:
            log.error("%s", too_often)
        return too_often is None

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if signum != signal.SIGHUP:
            self._signals += 1
