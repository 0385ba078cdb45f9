"""The link: the server's end of the connection to a worker on another machine.

It connects, and reconnects as long as the server runs. While connected, it listens on the Unix socket on which a local
worker would. Each TLS connection carries one connection of a router. When either ends, so does the other, because a new
router or worker does not share the old one's state.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import zmq

from moeserve import __version__
from moeserve.errors import ConfigError
from moeserve.messages.channels import PushChannel
from moeserve.messages.schema import WorkerExited
from moeserve.models.adapters.modules import parse_modules
from moeserve.models.open import open_metadata
from moeserve.processes.lifecycle import Process
from moeserve.remote.channel import ConnectionLost, FrameChannel
from moeserve.remote.fingerprint import fingerprint
from moeserve.remote.frames import FrameError, Kind, Welcome, decode_welcome
from moeserve.remote.options import parse_address, tls_files
from moeserve.remote.tls import link_context
from moeserve.remote.tunnel import LocalClosed, Tunnel, lost_by

CONNECT_S: Final = 5.0  # time for TCP, TLS and the welcome together
RETRY_S: Final = 0.1  # wait after the first failure; it doubles with each further failure
MOST_RETRY_S: Final = 1.0

log = logging.getLogger(__name__)


class Link:
    """The link. It runs in the process that would be the server's worker, on one thread."""

    def __init__(self, process: Process) -> None:
        """Raises UserError for certificates or a model that cannot be read."""
        config = process.config
        assert config.worker is not None
        self._process = process
        self._name = config.worker
        self._address = parse_address(config.worker, "--worker")
        self._context = link_context(tls_files(config), "--worker-ssl-")
        self._fingerprint = fingerprint(open_metadata(Path(config.model)))
        self._to_router = PushChannel(process.context, process.paths.router)
        self._complaint = ""  # the last one logged
        self._is_first = True

    def run(self) -> None:
        """Connects to the worker again and again, and forwards bytes both ways; the first connection makes this process
        ready. Never returns; the launcher ends the process. Raises ConfigError if the first worker that answers does
        not match the server."""
        delay = RETRY_S
        while True:
            try:
                channel, welcome = self._connect()
            except (ConnectionLost, OSError) as error:
                self._complain(error)
                time.sleep(delay)
                delay = min(2 * delay, MOST_RETRY_S)
                continue
            delay = RETRY_S
            self._complaint = ""
            log.info("connected to the worker at %s: %s", self._name, welcome.ready.device)
            if self._is_first:
                self._is_first = False
                self._process.ready(engine=welcome.ready)
            try:
                self._serve(channel)
            finally:
                channel.close()

    def _complain(self, error: Exception) -> None:
        """Logs a cause, once for each. Raises ConfigError for a cause that the user must fix before the server can
        start."""
        if self._is_first and isinstance(error, ConnectionLost) and error.is_refusal:
            raise ConfigError(f"--worker {self._name}: {error}") from error
        cause = f"the worker at {self._name} cannot be reached: {error}"
        if cause != self._complaint:
            log.warning("%s; trying again", cause)
        self._complaint = cause

    def _connect(self) -> tuple[FrameChannel, Welcome]:
        """Connects to the worker; returns the channel and its welcome. Raises ConnectionLost, OSError."""
        deadline = time.monotonic() + CONNECT_S
        sock = socket.create_connection(self._address, CONNECT_S)
        channel = FrameChannel(sock, self._context, self._address[0])
        try:
            poller = zmq.Poller()
            while True:
                for kind, content in channel.turn():
                    if kind is not Kind.WELCOME:
                        raise lost_by(kind, content)
                    return channel, self._checked(content)
                if time.monotonic() >= deadline:
                    raise ConnectionLost(f"no answer for {CONNECT_S:g} s")
                poller.register(channel.fileno(), zmq.POLLIN | (zmq.POLLOUT if channel.has_unsent else 0))
                poller.poll(milliseconds_until(min(deadline, channel.due) if channel.is_open else deadline))
        except BaseException:
            channel.close()
            raise

    def _checked(self, content: bytes) -> Welcome:
        """Decodes the worker's welcome. Raises ConnectionLost if its version or model differs from the router's."""
        try:
            welcome = decode_welcome(content)
        except FrameError as error:
            raise ConnectionLost(f"{error}; is it another version of moeserve?", is_refusal=True) from error
        if welcome.version != __version__:
            raise ConnectionLost(f"it is moeserve {welcome.version}, and this {__version__}", is_refusal=True)
        if welcome.fingerprint != self._fingerprint:
            raise ConnectionLost(
                f"it has another model than {self._process.config.model}: metadata or tensors differ",
                is_refusal=True,
            )
        adapters = parse_modules(self._process.config.lora_modules).keys()
        if adapters != welcome.ready.adapters.keys():
            there = ", ".join(sorted(welcome.ready.adapters)) or "none"
            raise ConnectionLost(
                f"its --lora-modules are {there}; name the same on both sides", is_refusal=True
            )
        return welcome

    def _serve(self, channel: FrameChannel) -> None:
        """Forwards bytes until the connection or the router is lost."""
        try:
            router = self._accept(channel)
        except ConnectionLost as error:
            log.warning("the connection to the worker at %s is lost: %s", self._name, error)
            return
        tunnel = Tunnel(router, channel)
        try:
            self._pump(tunnel, channel)
        except ConnectionLost as error:
            cause = f"the connection to the worker at {self._name} is lost: {error}"
            log.error("%s", cause)
            self._to_router.send(WorkerExited(cause, error.by_itself))
        except LocalClosed:
            log.info("the router is gone; waiting for the next one")
            time.sleep(RETRY_S)  # the worker's end must notice it too
        finally:
            tunnel.close()

    def _accept(self, channel: FrameChannel) -> socket.socket:
        """Returns the next router's connection to the socket of the worker. Raises ConnectionLost."""
        path = self._process.paths.worker
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(os.fspath(path))
            listener.listen(1)
            listener.setblocking(False)
            poller = zmq.Poller()
            poller.register(listener.fileno(), zmq.POLLIN)
            try:
                while True:
                    for kind, content in channel.turn():
                        raise lost_by(kind, content)
                    with suppress(BlockingIOError):
                        return listener.accept()[0]
                    poller.register(channel.fileno(), zmq.POLLIN | (zmq.POLLOUT if channel.has_unsent else 0))
                    poller.poll(milliseconds_until(channel.due))
            finally:
                path.unlink()  # no other process may connect meanwhile

    def _pump(self, tunnel: Tunnel, channel: FrameChannel) -> None:
        """Forwards bytes in both directions. Raises ConnectionLost, LocalClosed."""
        poller = zmq.Poller()
        while True:
            tunnel.turn()
            poller.register(channel.fileno(), zmq.POLLIN | (zmq.POLLOUT if channel.has_unsent else 0))
            poller.register(tunnel.local.fileno(), tunnel.local_events)
            poller.poll(milliseconds_until(channel.due))


def milliseconds_until(due: float) -> int:
    """Returns the milliseconds from now until a time of time.monotonic(); at least 0."""
    return max(math.ceil((due - time.monotonic()) * 1e3), 0)
