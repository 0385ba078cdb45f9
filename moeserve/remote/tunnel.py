"""Forwards bytes between a Unix socket and a FrameChannel."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Final

import zmq

from moeserve.remote.channel import ConnectionLost, FrameChannel
from moeserve.remote.frames import MOST_BYTES, FrameError, Kind, decode_end, encode_frame

# From this number of unsent bytes on, the local socket is not read.
MUCH_UNSENT: Final = 4 << 20
LAST_BYTES_S: Final = 1.0  # time for the local end to read the last bytes


class LocalClosed(Exception):
    """The Unix socket's other end has gone."""


class Tunnel:
    """Owns the Unix socket, not the channel. Data from the other machine is always received, so that a heartbeat never
    waits behind a plan for a busy worker. The data stays small: router and worker have little more than two plans and
    two results in progress."""

    def __init__(self, local: socket.socket, channel: FrameChannel) -> None:
        local.setblocking(False)
        self.local = local
        self._channel = channel
        self._to_local = bytearray()

    @property
    def local_events(self) -> int:
        """The events that the Unix socket is polled for."""
        reads = zmq.POLLIN if self._channel.num_unsent < MUCH_UNSENT else 0
        return reads | (zmq.POLLOUT if self._to_local else 0)

    def turn(self) -> None:
        """Forwards the available bytes. Raises ConnectionLost, LocalClosed."""
        for kind, content in self._channel.turn():
            if kind is Kind.DATA:
                self._to_local += content
            else:
                raise lost_by(kind, content)
        self._write_local()
        self._read_local()
        self._channel.flush()

    def close(self) -> None:
        """Closes the Unix socket, after writing to it what has arrived from the other machine."""
        with suppress(OSError):
            self.local.settimeout(LAST_BYTES_S)
            self.local.sendall(self._to_local)
        self.local.close()

    def _write_local(self) -> None:
        while self._to_local:
            try:
                del self._to_local[: self.local.send(self._to_local)]
            except BlockingIOError:
                break
            except OSError as error:
                self._to_local.clear()
                raise LocalClosed from error

    def _read_local(self) -> None:
        while self._channel.num_unsent < MUCH_UNSENT:
            try:
                data = self.local.recv(MOST_BYTES[Kind.DATA])
            except BlockingIOError:
                break
            except OSError as error:
                raise LocalClosed from error
            if not data:
                raise LocalClosed
            self._channel.send(encode_frame(Kind.DATA, data))
            self._channel.flush()


def lost_by(kind: Kind, content: bytes) -> ConnectionLost:
    """Returns the error for a frame that is not Data."""
    if kind is not Kind.END:
        return ConnectionLost(f"a {kind.name} frame out of place")
    try:
        end = decode_end(content)
    except FrameError as error:
        return ConnectionLost(str(error))
    return ConnectionLost(end.cause, by_itself=end.by_itself)
