"""The launcher of a server with several models. It owns the sockets and starts the front process, which starts the
models' servers as they are needed.

It serves nothing itself. When the front process crashes or stops sending heartbeats, the models' servers end with it,
and the launcher starts a new one. Clients that connect meanwhile wait, and models are loaded again at their next
request. SIGTERM and SIGINT make the front drain; a second one kills everything at once. SIGHUP makes it read its file
of keys again. SIGUSR2 and `moeserve reload` start the next server while this one runs (`launcher/succession.py`). The
next server takes new requests at once. It loads its models in the memory that this server's models do not hold
(`memory_share.py`). A watchdog resumes this process if it was stopped (`launcher/watchdog.py`).
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Final

import zmq
from setproctitle import setproctitle

from moeserve.config import LAUNCHER_PID_ENV
from moeserve.errors import ConfigError
from moeserve.front.config import FrontConfig
from moeserve.launcher.child_process import Child
from moeserve.launcher.crash_count import CrashCount
from moeserve.launcher.exit_codes import EXIT_ENGINE_LOST, EXIT_FAILED, EXIT_STOPPED
from moeserve.launcher.launched_config import write_config
from moeserve.launcher.runtime_directory import runtime_directory
from moeserve.launcher.signal_events import signals_as_events
from moeserve.launcher.succession import Succession
from moeserve.launcher.systemd import Systemd
from moeserve.launcher.watchdog import Watchdog
from moeserve.messages.channels import PullChannel
from moeserve.messages.codec import TO_LAUNCHER
from moeserve.messages.schema import Heartbeat, ProcessFailed, ProcessReady, ToLauncher
from moeserve.processes.lifecycle import die_with
from moeserve.processes.limits import prepare_limits
from moeserve.processes.listeners import Listeners, open_listeners, url_of, with_addresses
from moeserve.processes.runtime_paths import RuntimePaths
from moeserve.processes.silence import beat_interval, longest_silence

FRONT: Final = "front"
STOP_MARGIN_S: Final = 60.0  # time for the models' servers to end, in addition to the requests' own time
LAST_WORDS_S: Final = 0.5  # time in which a dead process's ProcessFailed is still read from its socket

log = logging.getLogger(__name__)


def launch_several(front: FrontConfig, package: str = "moeserve") -> int:
    """Runs the server until it is told to stop or fails; returns the exit code. Call it from the main thread."""
    setproctitle("moeserve: launcher")
    with ExitStack() as stack:
        try:
            # A server that can load one of its models starts.
            prepare_limits(
                min((model.config.threads for model in front.models if model.config.threads), default=None)
            )
            paths = RuntimePaths(stack.enter_context(runtime_directory()))
            is_next = LAUNCHER_PID_ENV in os.environ
            if is_next:
                die_with(int(os.environ.pop(LAUNCHER_PID_ENV)))
            listeners = open_listeners(front.common)
            stack.callback(listeners.close)
            write_config(with_addresses(front.common, listeners.api), paths)
            front.write(paths.directory)
            # Forked before there are sockets and threads.
            watchdog = Watchdog(beat_interval(front.common))
            stack.callback(watchdog.close)
            launcher = FrontLauncher(
                front, paths, listeners, watchdog, stack, f"{package}.{FRONT}", is_next=is_next
            )
        except (ConfigError, OSError) as error:
            log.error("%s", error)
            return EXIT_FAILED
        return launcher.run()


class FrontLauncher:
    """Starts and restarts the front process. Only the main thread calls it."""

    def __init__(
        self,
        front: FrontConfig,
        paths: RuntimePaths,
        listeners: Listeners,
        watchdog: Watchdog,
        stack: ExitStack,
        module: str,
        *,
        is_next: bool,
    ) -> None:
        """is_next: this is an upgrade; the earlier server, whose launcher is the parent process, still accepts
        connections at the `listeners`."""
        self._config = front.common
        self._paths = paths
        self._listeners = listeners
        self._watchdog = watchdog
        self._watchdog_due = 0.0
        self._module = module
        self._names = [model.name for model in front.models]
        self._signals = 0
        self._is_next = is_next
        self._is_handed_over = False  # another server takes the new requests
        self._is_upgrade_wanted = False
        self._hung_up = False  # a SIGHUP came and has not been passed to the front yet
        self._ready: ProcessReady | None = None
        self._last_words = ""
        self._has_been_ready = False
        self._silent_s = 0.0  # since the front's last heartbeat
        self._looked_at = time.monotonic()
        self._systemd = Systemd.from_env()
        self._crashes = CrashCount(front.common.max_engine_crashes)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(context.destroy, linger=0)
        self._inbox: PullChannel[ToLauncher] = PullChannel(context, paths.launcher, TO_LAUNCHER)
        self._wakeup = stack.enter_context(
            signals_as_events(self._on_signal, (signal.SIGUSR1, signal.SIGUSR2))
        )
        self._poller = zmq.Poller()
        self._poller.register(self._inbox.socket, zmq.POLLIN)
        self._poller.register(self._wakeup.fileno(), zmq.POLLIN)
        self._succession = Succession(paths.directory, listeners, self._systemd, self._poller)
        stack.callback(self._succession.close)
        self._front = self._spawn()

    def run(self) -> int:
        """Runs the server and returns the exit code. No process is left when it returns."""
        log.info("serving %s", ", ".join(map(repr, self._names)))
        try:
            while not self._signals and not self._is_handed_over:
                self._sleep()
                if not self._front.alive and not self._signals and (code := self._replace()) is not None:
                    return code
            code = self._leave() if self._is_handed_over else self._stop()
            self._end_front()
            if self._succession.current is None:
                return code
            return self._succession.follow(self._sleep, lambda: self._signals > 0)
        finally:
            self._end_front()

    def _spawn(self) -> Child:
        front = Child.spawn(
            FRONT,
            self._module,
            self._paths,
            variables=self._listeners.environment(),
            descriptors=self._listeners.descriptors(),
        )
        self._poller.register(front.descriptor, zmq.POLLIN)
        self._has_front = True
        return front

    def _replace(self) -> int | None:
        """Starts another front process. Returns the launcher's exit code instead if another process would fail
        again."""
        self._sleep_until(lambda: bool(self._last_words), LAST_WORDS_S)
        cause = self._last_words or self._front.cause_of_death()
        if not self._has_been_ready:
            log.error("the server could not start: %s", cause)
            return EXIT_FAILED
        log.error("the front process died (%s); the models are loaded again as they are asked for", cause)
        if (too_many := self._crashes.add(FRONT, was_ready=self._ready is not None)) is not None:
            log.error("stopping: %s", too_many)
            return EXIT_ENGINE_LOST
        self._end_front()
        self._ready, self._last_words, self._silent_s = None, "", 0.0
        self._front = self._spawn()
        return None

    def _end_front(self) -> None:
        """Ends the front process if there is one. May be called twice."""
        if self._has_front:
            self._has_front = False
            self._front.kill()
            self._poller.unregister(self._front.descriptor)
            self._front.close()

    def _leave(self) -> int:
        """Ends the front when its requests have ended. Another server takes new requests."""
        if self._front.alive:
            self._front.send_signal(signal.SIGUSR1)
        self._sleep_until(lambda: not self._front.alive or self._signals > 0, math.inf)
        return self._stop()

    def _stop(self) -> int:
        if not self._is_handed_over:
            self._systemd.notify("STOPPING=1")
            log.info("stopping: requests have %g s to finish", self._config.shutdown_timeout)
        if self._front.alive:
            self._front.send_signal(signal.SIGTERM)
        deadline = self._config.drain_delay + self._config.shutdown_timeout + STOP_MARGIN_S
        self._sleep_until(lambda: not self._front.alive, deadline)
        if self._signals > 1:
            log.warning("second signal: stopping at once")
            return EXIT_FAILED
        if self._front.alive:
            log.warning("the front process did not stop in time and is killed")
            return EXIT_FAILED
        if self._front.returncode != 0:
            log.error("the front process died (%s)", self._last_words or self._front.cause_of_death())
            return EXIT_FAILED
        return EXIT_STOPPED

    # ------------------------------------------------------------ watching

    def _sleep(self, timeout: float | None = None) -> None:
        """Sleeps until a message, a signal or the front's end, at most `timeout` seconds. Reads the messages."""
        interval = beat_interval(self._config)
        bounds = [wait for wait in (timeout, self._systemd.interval_s, interval) if wait is not None]
        woken_by = dict(self._poller.poll(math.ceil(min(bounds) * 1000)))
        if self._succession.current is None:
            self._systemd.still_alive()
        if self._wakeup.fileno() in woken_by:
            self._wakeup.recv(64)
        for message in self._inbox.drain():
            if isinstance(message, ProcessReady):
                self._is_ready(message)
            elif isinstance(message, ProcessFailed):
                self._last_words = message.message
            elif isinstance(message, Heartbeat):
                self._silent_s = 0.0
        self._look_at_silence(2 * interval)
        if time.monotonic() >= self._watchdog_due:
            self._watchdog_due = time.monotonic() + interval
            self._watchdog.look()
        if self._hung_up and self._ready is not None:
            self._hung_up = False
            if self._front.alive:
                self._front.send_signal(signal.SIGHUP)
        if self._succession.turn() or self._is_upgrade_wanted:
            self._upgrade()
        self._is_handed_over = self._is_handed_over or self._succession.current is not None

    def _upgrade(self) -> None:
        self._is_upgrade_wanted = False
        if self._is_next:
            self._succession.refuse(
                f"this process cannot start the next server: ask the launcher, process {os.getppid()}"
            )
        elif self._signals or (self._ready is None and self._succession.current is None):
            self._succession.refuse("the server is not ready")
        else:
            self._succession.begin()

    def _look_at_silence(self, most_s: float) -> None:
        """Ends a front process whose event loop hangs, and resumes one that was stopped by a signal. One call counts at
        most `most_s` seconds of silence: a longer gap means that this process itself was stopped."""
        now = time.monotonic()
        self._silent_s += min(now - self._looked_at, most_s)
        self._looked_at = now
        if (
            self._ready is None
            or not self._front.alive
            or self._silent_s < longest_silence(self._config.step_timeout)
        ):
            return
        if self._front.is_stopped:
            self._front.go_on()
        else:
            self._front.give_up(f"the front process has said nothing for {self._silent_s:.0f} s")
        self._silent_s = 0.0

    def _is_ready(self, message: ProcessReady) -> None:
        if not self._has_been_ready:
            self._systemd.notify("READY=1")
        self._ready, self._has_been_ready = message, True
        self._silent_s = 0.0  # it sends heartbeats from now on
        log.info("ready: %s, models are loaded as they are asked for", message.url)
        if self._listeners.health is not None:
            log.info("health and metrics: %s", url_of(self._listeners.health))

    def _sleep_until(self, done: Callable[[], bool], timeout: float) -> None:
        """Sleeps until `done()` is true, at most `timeout` seconds. Returns early for a second stop signal."""
        deadline = time.monotonic() + timeout
        while not done() and self._signals < 2 and (left := deadline - time.monotonic()) > 0:
            self._sleep(left)

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
            self._signals += 1
