"""The frames between a Sandbox and its process: a little-endian u32 length and that many bytes."""

from __future__ import annotations

import socket
import struct
import time

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 20


def send_frame(channel: socket.socket, body: bytes, deadline: float | None = None) -> None:
    """TimeoutError after `deadline` (time.monotonic)."""
    _allow(channel, deadline)
    channel.sendall(_LENGTH.pack(len(body)) + body)


def receive_frame(channel: socket.socket, max_bytes: int, deadline: float | None = None) -> bytes:
    """EOFError when the other side is gone, TimeoutError after `deadline`, ValueError for a larger frame."""
    size = _LENGTH.unpack(_receive_exactly(channel, _LENGTH.size, deadline))[0]
    if size > max_bytes:
        raise ValueError(f"a frame of {size} bytes; {max_bytes} at most are accepted")
    return _receive_exactly(channel, size, deadline)


def _receive_exactly(channel: socket.socket, size: int, deadline: float | None) -> bytes:
    received = bytearray()
    while len(received) < size:
        _allow(channel, deadline)
        chunk = channel.recv(min(size - len(received), _CHUNK))
        if not chunk:
            raise EOFError
        received += chunk
    return bytes(received)


def _allow(channel: socket.socket, deadline: float | None) -> None:
    if deadline is None:
        channel.settimeout(None)
        return
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    channel.settimeout(left)
