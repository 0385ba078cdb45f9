"""Upgrades without downtime: the launcher starts the program again beside its own server, and hands over to it.

The next server runs the same command line in a fresh interpreter, so all of its code, including its launcher, is the
currently installed version. The two servers communicate only by interfaces that do not change between versions:
inherited listening sockets (`listeners.py`), sd_notify(3) on a socket of this launcher, signals and the exit code.

    next server    READY=1 on its NOTIFY_SOCKET: it accepts connections, as the old server still does
    this launcher  SIGUSR1 to the old server, which stops accepting, finishes its requests and ends

The first launcher outlives its own server: it remains the parent, forwards signals, and exits with the exit code of
the last server. Its process id, by which systemd, a container or a shell knows the server, therefore never changes.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import zmq
from setproctitle import setproctitle

from moeserve.config import ADAPTERS_FILE, ADAPTERS_FILE_ENV, LAUNCHER_PID_ENV
from moeserve.launcher.exit_codes import EXIT_FAILED
from moeserve.launcher.systemd import Systemd
from moeserve.processes.listeners import Listeners

CONTROL = "control."  # prefix of the socket's name, before the launcher's process id
REPLY = re.compile(r"reload\.\d+")

log = logging.getLogger(__name__)


class NextServer:
    """A server started by this launcher; `descriptor` (a pidfd) becomes readable when it ends."""

    def __init__(self, listeners: Listeners, notify_socket: Path) -> None:
        environment = os.environ | listeners.environment()
        environment |= {"NOTIFY_SOCKET": str(notify_socket), LAUNCHER_PID_ENV: str(os.getpid())}
        environment.setdefault(ADAPTERS_FILE_ENV, str(notify_socket.parent / ADAPTERS_FILE))
        environment.pop("WATCHDOG_PID", None)  # they name this launcher, not the next server
        self.popen = subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:]],
            env=environment,
            stdin=subprocess.DEVNULL,
            process_group=0,
            pass_fds=listeners.descriptors(),
        )
        self.descriptor = os.pidfd_open(self.popen.pid)

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def close(self) -> None:
        """Kills the server if it still runs; its processes end with it."""
        self.popen.kill()
        self.popen.wait()
        os.close(self.descriptor)


class Succession:
    """The servers that `moeserve reload` starts after the launcher's own. Single-threaded."""

    def __init__(self, directory: Path, listeners: Listeners, systemd: Systemd, poller: zmq.Poller) -> None:
        """Opens a socket in `directory`, on which the next servers and `moeserve reload` send messages."""
        self._directory = directory
        self._listeners = listeners
        self._systemd = systemd
        self._poller = poller
        self._path = directory / f"{CONTROL}{os.getpid()}"
        self._control = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._control.bind(str(self._path))
        self._control.setblocking(False)
        poller.register(self._control.fileno(), zmq.POLLIN)
        self._next: NextServer | None = None  # the server that is starting
        self.current: NextServer | None = None  # the server that serves; None: the launcher's own processes
        self._leaving: list[NextServer] = []
        # reply sockets of the `moeserve reload` commands that wait for the outcome
        self._askers: list[str] = []

    def begin(self) -> None:
        """Starts the next server, unless one is starting already."""
        if self._next is not None:
            log.warning("an upgrade is under way already")
            return
        log.info("upgrade: the next server starts, this one goes on meanwhile")
        self._systemd.notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        self._next = NextServer(self._listeners, self._path)
        self._poller.register(self._next.descriptor, zmq.POLLIN)

    def turn(self) -> bool:
        """Handles events. Returns whether `moeserve reload` asked for the next server."""
        is_asked = False
        with suppress(BlockingIOError):
            while True:
                for line in self._control.recv(4096).decode(errors="replace").splitlines():
                    name, _, value = line.partition("=")
                    if name == "RELOAD" and REPLY.fullmatch(value):
                        self._askers.append(value)
                        is_asked = True
                    elif line == "READY=1" and self._next is not None:
                        self._hand_over(self._next)
                    elif line == "WATCHDOG=1" and self.current is not None:
                        self._systemd.notify(line)
        self._look_at_ends()
        return is_asked

    def follow(self, sleep: Callable[[], None], is_stopped: Callable[[], bool]) -> int:
        """Sleeps while servers after the launcher's own serve. Returns the exit code. is_stopped: the launcher was told
        to stop, and accepts no connections."""
        setproctitle("moeserve: parent")
        while (code := self.exit_code) is None:
            sleep()
            if is_stopped():
                self._listeners.close()
        return code if code >= 0 else EXIT_FAILED

    def _hand_over(self, server: NextServer) -> None:
        if self.current is not None:
            self.current.popen.send_signal(signal.SIGUSR1)
            self._leaving.append(self.current)
        self.current, self._next = server, None
        log.info("upgrade: the next server is ready, and the one before ends when its requests have")
        self._systemd.notify("READY=1")
        self._answer(f"READY={server.popen.pid}")

    def _look_at_ends(self) -> None:
        if self._next is not None and not self._next.alive:
            code = self._next.popen.returncode
            log.error("the upgrade failed: the next server ended with exit code %d; this one goes on", code)
            self._forget(self._next)
            self._next = None
            self._systemd.notify("READY=1")
            self._answer(f"FAILED={code}")
        for server in [server for server in self._leaving if not server.alive]:
            self._leaving.remove(server)
            self._forget(server)

    def _forget(self, server: NextServer) -> None:
        self._poller.unregister(server.descriptor)
        server.close()

    def refuse(self, cause: str) -> None:
        """Answers the waiting `moeserve reload` commands that the upgrade failed, with the cause."""
        log.warning("no upgrade: %s", cause)
        self._answer(f"REFUSED={cause}")

    def _answer(self, text: str) -> None:
        for name in self._askers:
            with suppress(OSError):  # the command is gone
                self._control.sendto(text.encode(), str(self._directory / name))
        self._askers.clear()

    def pass_on(self, signum: int) -> None:
        """Forwards a signal to all servers."""
        for server in [*self._leaving, *filter(None, [self.current])]:
            server.popen.send_signal(signum)

    @property
    def exit_code(self) -> int | None:
        """Returns the exit code of the current server; None while it or an older one runs."""
        if (
            self.current is None
            or self.current.alive
            or (self._leaving and self.current.popen.returncode == 0)
        ):
            return None
        return self.current.popen.returncode

    def close(self) -> None:
        for server in [*self._leaving, *filter(None, [self._next, self.current])]:
            server.close()
        self._control.close()
