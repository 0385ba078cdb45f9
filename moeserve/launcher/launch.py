"""The launcher: starts the server's processes, waits until they are ready, watches them, and stops them in order.

    httpserver   SIGTERM makes it drain: no new requests, the running ones finish
    router       Shutdown message; it tells the worker
    detokenizer  Shutdown message
    visualserver Shutdown message; exists only if the model has a vision tower
    worker       ends when the router tells it to

Events and their effects:

- a process fails while starting: its message goes to stderr, the others are killed, exit code 1
- SIGTERM or SIGINT: httpserver drains, the others follow, exit code 0; a second signal kills at once. SIGHUP makes
  httpserver read its file of keys again
- SIGUSR2 or `moeserve reload`: the next server starts beside this one, which ends when the new one is ready
  (`succession.py`)
- the worker dies while serving, or the router reports that it hangs: it is replaced, and the router continues the
  requests; /health is 503 meanwhile
- the router, the detokenizer or the visual server dies while serving or misses heartbeats: it is replaced, and
  httpserver sends its requests to the new one again; the worker stays, and the next router connects to it
- httpserver dies while serving or misses heartbeats: its connections are lost, the router cancels its requests, and
  it is replaced. New connections wait meanwhile, because the launcher owns the listening sockets
- processes die too often, or cannot be started again: the others are killed, exit code 3

In all cases no process, socket or directory is left behind. After `kill -9` of the launcher its children die with
it, and the next start removes the directory.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from types import FrameType

import msgspec
import zmq
from setproctitle import setproctitle

from moeserve.config import LAUNCHER_PID_ENV, ServerConfig
from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.launcher import process_table
from moeserve.launcher.child_process import ServerProcess
from moeserve.launcher.exit_codes import EXIT_ENGINE_LOST, EXIT_FAILED, EXIT_STOPPED
from moeserve.launcher.launched_config import pinned, write_config
from moeserve.launcher.process_table import DETOKENIZER, HTTPSERVER, LINK, ROUTER, VISUALSERVER, WORKER
from moeserve.launcher.replacement import Replacement
from moeserve.launcher.runtime_directory import runtime_directory
from moeserve.launcher.short_files import refuse_short_files
from moeserve.launcher.signal_events import signals_as_events
from moeserve.launcher.signs_of_life import SignsOfLife
from moeserve.launcher.succession import Succession
from moeserve.launcher.systemd import Systemd
from moeserve.messages.channels import PullChannel, PushChannel
from moeserve.messages.codec import TO_LAUNCHER
from moeserve.messages.schema import (
    Heartbeat,
    HeartbeatRequest,
    ProcessFailed,
    ProcessReady,
    ReplaceWorker,
    Shutdown,
    ToLauncher,
)
from moeserve.processes.lifecycle import die_with
from moeserve.processes.limits import prepare_limits
from moeserve.processes.listeners import Listeners, open_listeners, url_of, with_addresses
from moeserve.processes.runtime_paths import RuntimePaths
from moeserve.processes.silence import longest_silence

DRAIN_MARGIN_S = 8.0  # for httpserver to close its connections, after the requests' own time limit
EXIT_TIMEOUT_S = 10.0  # for the other processes after Shutdown; the worker has gigabytes to free
LAST_WORDS_S = 0.5  # for the ProcessFailed message of a dead child to arrive

log = logging.getLogger(__name__)


def launch(config: ServerConfig, package: str = "moeserve") -> int:
    """Runs a server, whose processes are modules of `package`, until its end. Call it from the main thread."""
    setproctitle("moeserve: launcher")
    with ExitStack() as stack:
        try:
            refuse_short_files(config)
            prepare_limits(config.threads)
            paths = RuntimePaths(stack.enter_context(runtime_directory()))
            is_next = LAUNCHER_PID_ENV in os.environ
            if is_next:
                die_with(int(os.environ.pop(LAUNCHER_PID_ENV)))
            listeners = open_listeners(config)
            stack.callback(listeners.close)
            launcher = Launcher(
                with_addresses(config, listeners.api), paths, package, listeners, stack, is_next=is_next
            )
        except (ConfigError, OSError) as error:
            log.error("%s", error)
            return EXIT_FAILED
        return launcher.run()


class Launcher:
    """Runs one server. Single-threaded; it sleeps in a poll loop until something happens."""

    def __init__(
        self,
        config: ServerConfig,
        paths: RuntimePaths,
        package: str,
        listeners: Listeners,
        stack: ExitStack,
        *,
        is_next: bool,
    ) -> None:
        """Binds the launcher's sockets and installs the signal handlers; `stack` undoes both. `is_next`: an upgrade.
        The previous server still accepts at the same `listeners`, and its launcher is this one's parent
        (`succession.py`)."""
        self.config = config
        self.paths = paths
        self.ready: dict[str, ProcessReady] = {}
        self.last_words: dict[str, str] = {}  # process → message of its failure, the first failure first
        self.signals = 0  # stop signals received so far
        self._is_next = is_next
        self._is_handed_over = False  # True after another server took over the listening sockets
        self._is_upgrade_wanted = False
        self._hung_up = False  # a SIGHUP arrived that httpserver has not been told of
        self._systemd = Systemd.from_env()
        self._listeners = listeners
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(self._context.destroy, linger=0)
        write_config(config, paths)
        # Connect now: a socket's file may be deleted while the server runs.
        told = {ROUTER: paths.router, DETOKENIZER: paths.detokenizer, HTTPSERVER: paths.http}
        if config.mmproj:
            told[VISUALSERVER] = paths.visualserver
        self._channels = {address: PushChannel(self._context, address) for address in told.values()}
        self._inbox: PullChannel[ToLauncher] = PullChannel(self._context, paths.launcher, TO_LAUNCHER)
        self._wakeup = stack.enter_context(
            signals_as_events(self._on_signal, (signal.SIGUSR1, signal.SIGUSR2))
        )
        self._poller = zmq.Poller()
        self._poller.register(self._inbox.socket, zmq.POLLIN)
        self._poller.register(self._wakeup.fileno(), zmq.POLLIN)
        remote = {} if config.worker is None else {WORKER: LINK}
        self._processes = process_table.ProcessTable(
            package, paths, self._poller, listeners, remote, has_tower=config.mmproj is not None
        )
        self._processes.listens_when_ready = is_next
        self._signs_of_life = SignsOfLife(
            longest_silence(config.step_timeout),
            self._processes,
            self.ready,
            {name: partial(self._tell, address, HeartbeatRequest()) for name, address in told.items()},
        )
        self._replacement = Replacement(
            config,
            paths,
            self._processes,
            self.ready,
            self.last_words,
            self._signs_of_life,
            self._tell,
            self._log_death,
        )
        self._succession = Succession(paths.directory, listeners, self._systemd, self._poller)
        stack.callback(self._succession.close)

    def run(self) -> int:
        """Runs the server. Returns the exit code when all children are dead."""
        try:
            self._spawn()
            if not self._wait_until_ready():
                return EXIT_STOPPED if self.signals else EXIT_FAILED
            self._report_ready()
            failure = self._watch()
            code = self._drain() if failure is None else failure
            self._processes.kill_all()
            if self._succession.current is None:
                return code
            return self._succession.follow(self._sleep, lambda: self.signals > 0)
        finally:
            self._processes.kill_all()

    # ---------------------------------------------------------------- phases

    def _spawn(self) -> None:
        log.info("serving %s as %r", self.config.model, self.config.served_model_name)
        self._processes.start_all()

    def _wait_until_ready(self) -> bool:
        """Returns False if a child failed (its message is logged) or a stop signal arrived."""
        while len(self.ready) < len(self._processes.names):
            dead = self._processes.dead()
            if dead:
                self._sleep_until(lambda: bool(self.last_words), LAST_WORDS_S)
            for name, message in self.last_words.items():
                log.error("the server could not start: %s (%s)", message, name)
                return False  # only the first failure is logged: it may have caused the others
            if dead:
                log.error("%s died while starting: %s", dead[0].name, dead[0].cause_of_death())
                return False
            if self.signals:
                log.info("stopped while starting")
                return False
            self._sleep()
        return self._pin_config()

    def _pin_config(self) -> bool:
        """Writes the configuration for restarted workers (see `pinned`) now, while the disk is unlikely to be full.
        Returns False if that fails."""
        engine = self.ready[WORKER].engine
        if engine is not None:
            try:
                write_config(pinned(self.config, engine), self.paths)
            except OSError as error:
                log.error("%s", error)
                return False
        return True

    def _report_ready(self) -> None:
        url = self.ready[HTTPSERVER].url or f"http://{self.config.host}:{self.config.port}"
        engine = self.ready[WORKER].engine
        tokens = ""
        if engine is not None:
            tokens = f", {engine.num_kv_slots:,} KV tokens available, steps of up to {engine.max_num_batched_tokens:,}"
            tokens += f", {engine.device}"
            if self.config.mmproj and not engine.embedding_size:
                log.warning("--mmproj has no effect: several GPUs and remote workers see no pictures")
        self._processes.listens_when_ready = False  # from here on only this server accepts connections
        self._systemd.notify("READY=1")
        log.info("ready: %s, memory used %.2f GiB%s", url, self._processes.memory_used() / GIB, tokens)
        if self._listeners.health is not None:
            log.info("health and metrics: %s", url_of(self._listeners.health))

    def _watch(self) -> int | None:
        """Sleeps until something ends the server. Returns None for a stop signal, else the exit code after a fatal
        death."""
        while not self.signals and not self._is_handed_over:
            dead = self._processes.dead()
            if not dead:
                self._sleep()
            elif not self._replacement.replace(dead):
                return EXIT_ENGINE_LOST
        return None

    def _drain(self) -> int:
        """Stops the server in order: httpserver first, so that every request gets its last message. Returns the exit
        code."""
        if not self._is_handed_over:
            self._systemd.notify("STOPPING=1")
            log.info("stopping: requests have %g s to finish", self.config.shutdown_timeout)
        self._processes.go_on()
        httpserver = self._processes.child(HTTPSERVER)
        assert httpserver is not None
        self._sleep_until(lambda: HTTPSERVER in self.ready or not httpserver.alive, EXIT_TIMEOUT_S)
        if httpserver.alive and self._is_handed_over:
            httpserver.send_signal(signal.SIGUSR1)
            self._sleep_until(
                lambda: not httpserver.alive or self._may_leave_no_longer() or self._lost_while_draining(),
                math.inf,
            )
        if httpserver.alive:
            httpserver.send_signal(signal.SIGTERM)
        if self._succession.current is None:
            # httpserver answers clients that still connect; after it no process would
            self._listeners.close()
        self._sleep_until(
            lambda: not httpserver.alive or self._lost_while_draining(),
            self.config.shutdown_timeout + DRAIN_MARGIN_S,
        )
        self._processes.go_on()  # a process may have been stopped (SIGSTOP) since
        for address in self._channels:
            if address != self.paths.http:
                self._tell(address, Shutdown())
        if self.config.worker is not None:  # the link to the remote worker stays open for later routers
            self._sleep_until(lambda: not self._processes.is_alive(ROUTER), EXIT_TIMEOUT_S)
            self._processes[WORKER].kill()
        if not {ROUTER, WORKER} <= self.ready.keys():
            self._processes[WORKER].kill()  # no process would tell it to end
        self._processes.want_no_other_worker()
        self._sleep_until(lambda: len(self._processes.dead()) == len(self._processes), EXIT_TIMEOUT_S)
        return self._outcome()

    def _may_leave_no_longer(self) -> bool:
        """Returns whether the server after this one has to end, too."""
        return self.signals > 0 or self._succession.exit_code is not None

    def _outcome(self) -> int:
        """Returns the exit code after draining: EXIT_STOPPED if every process but the worker exited by itself with
        code 0."""
        if self.signals > 1:
            log.warning("second signal: stopping at once")
            return EXIT_FAILED
        code = EXIT_STOPPED
        for child in self._processes.all():
            if child.alive:
                log.warning("%s did not stop in time and is killed", child.name)
                code = EXIT_FAILED
            elif child.returncode != 0 and child.name != WORKER:
                self._log_death(child)
                code = EXIT_FAILED
        return code

    # ---------------------------------------------------------------- watching

    def _sleep(self, timeout: float | None = None) -> None:
        """Sleeps until a message, a stop signal or a child's death, at most `timeout` seconds, and handles the
        messages.

        A death wakes the loop only once: check for dead children and `signals` between two sleeps.
        """
        timeout = min(filter(None, (timeout, self._systemd.interval_s, self._signs_of_life.interval_s)))
        woken_by = dict(self._poller.poll(math.ceil(timeout * 1000)))
        if self._succession.current is None:
            self._systemd.still_alive()
        self._processes.woken_by(woken_by)
        with suppress(BlockingIOError):
            self._wakeup.recv(64)
        for message in self._inbox.drain():
            if isinstance(message, ProcessReady):
                self._is_ready(message)
            elif isinstance(message, ProcessFailed):
                self.last_words[message.process] = message.message
            elif isinstance(message, Heartbeat):
                self._signs_of_life.answered(message.process)
            else:
                self._give_up(message)
        if self._hung_up and HTTPSERVER in self.ready and (httpserver := self._processes.child(HTTPSERVER)):
            self._hung_up = False
            httpserver.send_signal(signal.SIGHUP)
        if self._succession.turn() or self._is_upgrade_wanted:
            self._upgrade()
        if self._succession.current is not None:
            self._is_handed_over = True
        self._signs_of_life.turn()

    def _upgrade(self) -> None:
        self._is_upgrade_wanted = False
        if self._is_next:
            self._succession.refuse(
                f"this process cannot start the next server: ask the launcher, process {os.getppid()}"
            )
        elif self.signals or len(self.ready) < len(self._processes.names):
            self._succession.refuse("the server is not ready")
        else:
            self._succession.begin()

    def _is_ready(self, message: ProcessReady) -> None:
        self.ready[message.process] = message
        crashes = self._replacement.crashes
        if crashes and len(self.ready) == len(self._processes.names):
            taken = crashes.since_last_s
            log.info("the engine is back: the %s was ready after %.2f s", message.process, taken)

    def _give_up(self, message: ReplaceWorker) -> None:
        worker = self._processes[WORKER]
        if worker.pid == message.pid and not worker.is_reported:  # otherwise it is being replaced already
            worker.is_reported = True
            # Often the worker has just died, and its own end, which names the cause, is noticed in a moment.
            self._sleep_until(lambda: not worker.alive, LAST_WORDS_S)
            worker.give_up(message.cause)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGUSR2:
            self._is_upgrade_wanted = True
            return
        if signum == signal.SIGUSR1:  # sent by the launcher that started this one
            self._is_handed_over = self._is_handed_over or self._is_next
            return
        self._succession.pass_on(signum)
        if signum == signal.SIGHUP:
            self._hung_up = True
        else:
            self.signals += 1

    def _tell(self, address: str, message: msgspec.Struct) -> None:
        self._channels[address].send(message)

    def _sleep_until(self, done: Callable[[], bool], timeout: float) -> None:
        """Sleeps until `done()` is true or `timeout` seconds passed; returns early at a second stop signal."""
        deadline = time.monotonic() + timeout
        while not done() and self.signals < 2 and (left := deadline - time.monotonic()) > 0:
            self._sleep(left)

    def _lost_while_draining(self) -> bool:
        """Returns whether the running requests cannot finish because a process died that cannot be replaced."""
        dead = [process for process in self._processes.dead() if process.name != HTTPSERVER]
        return bool(dead) and not self._replacement.replace(dead)

    def _log_death(self, child: ServerProcess) -> None:
        if (child.returncode or 0) > 0:  # not killed by a signal, so it may have sent its reason
            self._sleep_until(lambda: child.name in self.last_words, LAST_WORDS_S)
        said = self.last_words.get(child.name)
        log.error("%s died (%s)%s", child.name, child.cause_of_death(), f": {said}" if said else "")
