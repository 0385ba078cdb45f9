"""Length-prefixed frames between two processes: a little-endian u32 length, then that many bytes."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 20

# Called to wait until the socket is readable (select.POLLIN) or writable (POLLOUT); may raise to end the wait.
Wait = Callable[[int], None]


def send_frame(line: socket.socket, body: bytes, wait: Wait | None = None) -> None:
    """Sends a frame. Raises ConnectionError if the other side is gone, and what `wait` raises."""
    frame = _LENGTH.pack(len(body)) + body
    if wait is None:
        line.sendall(frame)
        return
    unsent = memoryview(frame)
    while unsent:
        wait(select.POLLOUT)
        unsent = unsent[line.send(unsent, socket.MSG_DONTWAIT) :]


def receive_frame(line: socket.socket, max_bytes: int, wait: Wait | None = None) -> bytes:
    """Waits for a frame of at most `max_bytes` and returns its bytes. Raises EOFError if the other side is gone,
    ValueError for a larger frame, and what `wait` raises."""
    size = _LENGTH.unpack(_receive_exactly(line, _LENGTH.size, wait))[0]
    if size > max_bytes:
        raise ValueError(f"a frame of {size} bytes; {max_bytes} at most are accepted")
    return _receive_exactly(line, size, wait)


def _receive_exactly(line: socket.socket, size: int, wait: Wait | None) -> bytes:
    received = bytearray()
    while len(received) < size:
        if wait is not None:
            wait(select.POLLIN)
        chunk = line.recv(min(size - len(received), _CHUNK))
        if not chunk:
            raise EOFError
        received += chunk
    return bytes(received)
