"""Upgrades without loss: the launcher starts the program again beside its own server, and hands over to it.

The next server is the same command line in a fresh interpreter, so that all of it is the code that is installed now,
its launcher too. Between the two there are only interfaces that do not change with a version: inherited listening
sockets (`listeners.py`), sd_notify(3) on a socket of ours, signals and the exit code.

    next server    READY=1 on its NOTIFY_SOCKET: it accepts connections, as the one before still does
    this launcher  SIGUSR1 to the server before, which accepts no more, finishes what runs and ends

Where the server before is this launcher's own, the launcher outlives it: it stays the parent, passes signals on, and
ends with the exit code of the server that serves then. So its process id, by which systemd, a container or a shell
knows the server, stays what it was.
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
from contextlib import suppress
from pathlib import Path

import zmq

from moeserve.config import ADAPTERS_FILE, ADAPTERS_FILE_ENV, LAUNCHER_PID_ENV
from moeserve.launcher.systemd import Systemd
from moeserve.processes.listeners import Listeners

CONTROL = "control."  # the socket's name, before the launcher's process id
REPLY = re.compile(r"reload\.\d+")

log = logging.getLogger(__name__)


class NextServer:
    """A server that this launcher has started; `descriptor` (a pidfd) becomes readable when it ends."""

    def __init__(self, listeners: Listeners, notify_socket: Path) -> None:
        environment = os.environ | listeners.environment()
        environment |= {"NOTIFY_SOCKET": str(notify_socket), LAUNCHER_PID_ENV: str(os.getpid())}
        environment.setdefault(ADAPTERS_FILE_ENV, str(notify_socket.parent / ADAPTERS_FILE))
        environment.pop("WATCHDOG_PID", None)  # is ours
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
        """Kills it, if it still runs; its own processes end with it."""
        self.popen.kill()
        self.popen.wait()
        os.close(self.descriptor)


class Succession:
    """The servers after the launcher's own. Used by its thread alone."""

    def __init__(self, directory: Path, listeners: Listeners, systemd: Systemd, poller: zmq.Poller) -> None:
        """Opens a socket in `directory` for the next servers and for `moeserve reload`."""
        self._directory = directory
        self._listeners = listeners
        self._systemd = systemd
        self._poller = poller
        self._path = directory / f"{CONTROL}{os.getpid()}"
        self._control = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._control.bind(str(self._path))
        self._control.setblocking(False)
        poller.register(self._control.fileno(), zmq.POLLIN)
        self._next: NextServer | None = None  # starts
        self.current: NextServer | None = None  # serves; None: the launcher's own processes do
        self._leaving: list[NextServer] = []
        self._askers: list[str] = []  # names of the sockets that wait for the outcome

    def begin(self) -> None:
        """Starts the next server, unless one starts already."""
        if self._next is not None:
            log.warning("an upgrade is under way already")
            return
        log.info("upgrade: the next server starts, this one goes on meanwhile")
        self._systemd.notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        self._next = NextServer(self._listeners, self._path)
        self._poller.register(self._next.descriptor, zmq.POLLIN)

    def turn(self) -> bool:
        """Takes in what has happened. Returns whether `moeserve reload` has asked for the next server."""
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
        """Says no to who has asked."""
        log.warning("no upgrade: %s", cause)
        self._answer(f"REFUSED={cause}")

    def _answer(self, text: str) -> None:
        for name in self._askers:
            with suppress(OSError):  # it has left
                self._control.sendto(text.encode(), str(self._directory / name))
        self._askers.clear()

    def pass_on(self, signum: int) -> None:
        """A signal of the launcher's, to all that serve."""
        for server in [*self._leaving, *filter(None, [self.current])]:
            server.popen.send_signal(signum)

    @property
    def exit_code(self) -> int | None:
        """The exit code of the server that serves; None while it or one before runs."""
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
