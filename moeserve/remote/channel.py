"""Frames over one TLS connection, for a poll loop. No function here waits.

TLS runs over buffers in memory, not over the socket. So outgoing data never blocks incoming data, and a handshake is a
state of the channel like any other.
"""

from __future__ import annotations

import socket
import ssl
import time
from typing import Any, Final

from moeserve.remote.frames import FrameError, FrameReader, Kind, encode_frame

HEARTBEAT_S: Final = 0.5  # seconds without another frame after which it is sent
LOST_S: Final = 1.5  # seconds of silence after which the other end counts as lost
CHUNK: Final = 1 << 16
READS_PER_TURN: Final = 64  # bytes per turn, so that no peer occupies the loop
MOST_UNSENT: Final = 512 << 20  # two of the longest messages (`channels.MAX_MESSAGE_BYTES`)


class ConnectionLost(Exception):
    """The connection has ended; the message says why."""

    def __init__(self, cause: str, *, by_itself: bool = False, is_refusal: bool = False) -> None:
        """by_itself: the worker has crashed. is_refusal: one of the two ends does not trust the other's certificate."""
        super().__init__(cause)
        self.by_itself = by_itself
        self.is_refusal = is_refusal


class FrameChannel:
    """One end of a connection. `turn` is called when the socket is readable, or writable while `has_unsent`, and at
    `due`."""

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, server_hostname: str | None = None
    ) -> None:
        """`sock` is connected; the channel owns it. server_hostname: the name that the peer's certificate must have;
        None at the listening end."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # After this time the kernel drops undelivered data, even of a closed socket.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(LOST_S * 1e3))
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=server_hostname is None,
            server_hostname=server_hostname,
        )
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._lost: ConnectionLost | None = None  # raised after all earlier frames were returned
        self._heard_at = self._spoke_at = time.monotonic()
        self.is_open = False  # the handshake has ended: each end has verified the other

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    @property
    def num_unsent(self) -> int:
        """Bytes that the socket has not taken yet."""
        return len(self._unsent)

    @property
    def due(self) -> float:
        """Returns when `turn` must be called next, in the time of time.monotonic()."""
        return min(self._spoke_at + HEARTBEAT_S, self._heard_at + LOST_S)

    @property
    def peer_name(self) -> str:
        """The common name in the other end's certificate."""
        certificate = self._tls.getpeercert() or {}
        subject: Any = certificate.get("subject", ())
        names = [str(value) for part in subject for name, value in part if name == "commonName"]
        return names[0] if names else "unnamed"

    def turn(self) -> list[tuple[Kind, bytes]]:
        """Receives and sends what the socket allows. Returns the received frames, without heartbeats. Raises
        ConnectionLost."""
        if self._lost is not None:
            raise self._lost
        now = time.monotonic()
        self._receive(now)
        if not self.is_open:
            self._shake_hands()
        frames: list[tuple[Kind, bytes]] = []
        if self.is_open:
            self._take_frames(frames)
            if self._lost is None and now - self._heard_at >= LOST_S:
                self._lost = ConnectionLost(f"nothing was heard for {LOST_S:g} s")
            if self._lost is None and now - self._spoke_at >= HEARTBEAT_S:
                self.send(encode_frame(Kind.HEARTBEAT))
        if self._lost is None:
            self.flush()
        if self._lost is not None and not frames:
            raise self._lost
        return frames

    def send(self, frame: bytes) -> None:
        """Queues the frame's bytes to be sent by the next `turn` or `flush`. Call it only when the channel is open. If
        the connection has ended meanwhile, the frame is dropped, and the next `turn` raises."""
        try:
            self._tls.write(frame)
        except ssl.SSLError as error:
            self._lost = self._lost or _from_tls(error)
        self._spoke_at = time.monotonic()

    def flush(self) -> None:
        """Sends as much as the socket takes. If the connection was lost meanwhile, the next `turn` raises."""
        self._unsent += self._outgoing.read()
        while self._unsent:
            try:
                del self._unsent[: self._sock.send(self._unsent)]
            except BlockingIOError:
                break
            except OSError as error:
                self._lost = self._lost or ConnectionLost(error.strerror or str(error))
                break
        if len(self._unsent) > MOST_UNSENT:
            self._lost = self._lost or ConnectionLost(f"{len(self._unsent)} bytes could not be sent")

    def close(self) -> None:
        self._sock.close()

    def _receive(self, now: float) -> None:
        for _ in range(READS_PER_TURN if self.is_open else 1):
            try:
                data = self._sock.recv(CHUNK)
            except BlockingIOError:
                break
            except OSError as error:
                self._lost = ConnectionLost(error.strerror or str(error))
                break
            if not data:
                self._incoming.write_eof()
                break
            self._incoming.write(data)
            self._heard_at = now

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLError as error:
            self.flush()  # the alert
            self._lost = _from_tls(error)
            return
        self.is_open = True
        self._heard_at = time.monotonic()

    def _take_frames(self, frames: list[tuple[Kind, bytes]]) -> None:
        try:
            while data := self._tls.read(CHUNK):
                frames += (frame for frame in self._reader.feed(data) if frame[0] is not Kind.HEARTBEAT)
            self._lost = self._lost or ConnectionLost("the other end has closed it")
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._lost = _from_tls(error)
        except FrameError as error:
            self._lost = ConnectionLost(str(error))


def _from_tls(error: ssl.SSLError) -> ConnectionLost:
    if isinstance(error, ssl.SSLCertVerificationError):
        return ConnectionLost(f"the other end's certificate: {error.verify_message}", is_refusal=True)
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return ConnectionLost("the other end has closed it")
    reason = (error.reason or str(error)).replace("_", " ").lower()
    return ConnectionLost(f"TLS: {reason}", is_refusal=True)
