"""The gate in front of a worker: admits one router at a time from other machines, over mutual TLS."""

from __future__ import annotations

import logging
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec
import zmq

from moeserve.remote.channel import ConnectionLost, FrameChannel
from moeserve.remote.frames import Kind, Welcome, encode_end, encode_frame
from moeserve.remote.tunnel import LocalClosed, Tunnel

HANDSHAKE_S: Final = 5.0
MOST_HANDSHAKES: Final = 64  # handshakes in progress; beyond this number the oldest is dropped
CAUSE_S: Final = 0.5  # time for the worker's exit to be noticed, which explains why its socket was closed
LAST_FRAME_S: Final = 1.0  # time for the other end to read an End and to close
BACKLOG: Final = 64

log = logging.getLogger(__name__)


class NotServing(Exception):
    """Raised if no worker can be connected to; the message says why."""


# Connects to the worker; raises NotServing.
WorkerDoor = Callable[[], tuple[Welcome, socket.socket]]


class Session:
    """One connection from another machine: a handshake, then a tunnel to the worker or an End."""

    def __init__(self, channel: FrameChannel, address: str, now: float) -> None:
        self.channel = channel
        self.name = address
        self.tunnel: Tunnel | None = None
        self.deadline: float | None = now + HANDSHAKE_S  # when the session is ended; None while it is served
        self.awaits_cause = False  # the worker has closed its socket without a stated cause

    @property
    def due(self) -> float:
        due = self.channel.due if self.channel.is_open else float("inf")
        return due if self.deadline is None else min(due, self.deadline)


class Gate:
    """Accepts connections and connects one at a time to the worker. Its sockets are in the owner's poller; call `turn`
    after each poll."""

    def __init__(
        self, listener: socket.socket, context: ssl.SSLContext, poller: zmq.Poller, door: WorkerDoor
    ) -> None:
        """context: of `tls.gate_context`. The caller keeps owning `listener` and `poller`."""
        listener.setblocking(False)
        self._listener = listener
        self._context = context
        self._poller = poller
        self._door = door
        self._sessions: list[Session] = []
        self._served: Session | None = None
        poller.register(listener.fileno(), zmq.POLLIN)

    @property
    def is_serving(self) -> bool:
        """True while a router is connected to the worker."""
        return self._served is not None

    @property
    def due(self) -> float:
        """Returns when `turn` must be called next, in the time of time.monotonic()."""
        return min((session.due for session in self._sessions), default=float("inf"))

    def turn(self) -> None:
        """Makes progress on all connections, without waiting."""
        self._accept()
        for session in list(self._sessions):
            try:
                self._serve(session, time.monotonic())
            except ConnectionLost as error:
                self._drop(session, str(error))
            else:
                self._watch(session)

    def worker_lost(self, cause: str, *, by_itself: bool) -> None:
        """Tells the connected router why its worker was lost."""
        if (session := self._served) is not None:
            self._end(session, cause, by_itself=by_itself)
            self._watch(session)

    def close(self) -> None:
        for session in list(self._sessions):
            self._drop(session, "the worker is stopped")
        self._poller.register(self._listener.fileno(), 0)

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError:  # the other end has closed, or has waited too long
                return
            name = f"{address[0]}, port {address[1]}"
            with suppress(OSError):  # it may have ended already
                self._sessions.append(Session(FrameChannel(sock, self._context), name, time.monotonic()))
            shaking = [session for session in self._sessions if not session.channel.is_open]
            if len(shaking) > MOST_HANDSHAKES:
                self._drop(shaking[0], "too many handshakes at once")

    def _serve(self, session: Session, now: float) -> None:
        """Makes progress on one connection. Raises ConnectionLost if it has ended or took too long."""
        if session.deadline is not None and now >= session.deadline:
            if not session.awaits_cause:
                raise ConnectionLost("it took too long")
            self._end(session, "the worker has closed the connection")
        if session.tunnel is not None:
            self._move(session, now)
            return
        was_open = session.channel.is_open
        if session.channel.turn() and not was_open:
            raise ConnectionLost("it has spoken before the welcome")
        if session.channel.is_open and not was_open:
            self._admit(session)

    def _move(self, session: Session, now: float) -> None:
        assert session.tunnel is not None
        try:
            session.tunnel.turn()
        except LocalClosed:
            self._close_tunnel(session)
            session.awaits_cause = True
            session.deadline = now + CAUSE_S
            session.channel.flush()

    def _admit(self, session: Session) -> None:
        session.name = f"{session.channel.peer_name!r} at {session.name}"
        if self._served is not None:
            self._end(session, "the worker serves another router")
            return
        try:
            welcome, local = self._door()
        except NotServing as error:
            self._end(session, str(error))
            return
        log.info("the router of %s is connected", session.name)
        self._served = session
        session.deadline = None
        session.tunnel = Tunnel(local, session.channel)
        session.channel.send(encode_frame(Kind.WELCOME, msgspec.msgpack.encode(welcome)))
        session.channel.flush()

    def _end(self, session: Session, cause: str, *, by_itself: bool = False) -> None:
        """Sends an End. The connection stays until the other end has read the reason and closes."""
        if session.tunnel is not None:
            self._close_tunnel(session)
        was_served = session is self._served
        if was_served:
            self._served = None
        log.log(logging.INFO if was_served else logging.DEBUG, "%s is sent away: %s", session.name, cause)
        session.awaits_cause = False
        session.deadline = time.monotonic() + LAST_FRAME_S
        session.channel.send(encode_end(cause, by_itself=by_itself))
        session.channel.flush()

    def _close_tunnel(self, session: Session) -> None:
        assert session.tunnel is not None
        self._poller.register(session.tunnel.local.fileno(), 0)
        session.tunnel.close()
        session.tunnel = None

    def _drop(self, session: Session, cause: str) -> None:
        if session is self._served:
            log.info("the router of %s has gone: %s", session.name, cause)
            self._served = None
        else:
            log.debug("the connection of %s is closed: %s", session.name, cause)
        if session.tunnel is not None:
            self._close_tunnel(session)
        self._poller.register(session.channel.fileno(), 0)
        session.channel.close()
        self._sessions.remove(session)

    def _watch(self, session: Session) -> None:
        channel = session.channel
        self._poller.register(channel.fileno(), zmq.POLLIN | (zmq.POLLOUT if channel.has_unsent else 0))
        if session.tunnel is not None:
            self._poller.register(session.tunnel.local.fileno(), session.tunnel.local_events)
