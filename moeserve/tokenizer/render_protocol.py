"""The frames between a ChatRenderer and its process: a little-endian u32 length and a msgpack struct."""

from __future__ import annotations

import socket
import struct
import time
from typing import Any

import msgspec

MAX_REQUEST_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 20


class Compile(msgspec.Struct, frozen=True, tag=True):
    """The first request. Answered by `Rendered("")` or `Failed`."""

    source: str
    variables: dict[str, str]
    max_output_chars: int


class Render(msgspec.Struct, frozen=True, tag=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    kwargs: dict[str, Any]


class Rendered(msgspec.Struct, frozen=True, tag=True):
    text: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    message: str


Request = Compile | Render
Reply = Rendered | Failed

encode = msgspec.msgpack.Encoder().encode
_request: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def decode_request(body: bytes) -> Request:
    return _request.decode(body)


def decode_reply(body: bytes) -> Reply:
    """ValueError for anything but a reply."""
    return _reply.decode(body)


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
