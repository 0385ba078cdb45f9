"""The frames that link and gate send each other within TLS: kind, length, and that many bytes.

The gate speaks first: a Welcome, or an End that says why not. Then both send the bytes of rpyc's connection as Data,
and a Heartbeat when they have sent nothing for a while. An End is the last frame.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Final

import msgspec

from moeserve.messages.steps import WorkerReady


class Kind(IntEnum):
    WELCOME = 1
    DATA = 2
    HEARTBEAT = 3
    END = 4


# Of a frame's content. A longer one ends the connection before any of it is kept.
MOST_BYTES: Final = {Kind.WELCOME: 1 << 20, Kind.DATA: 1 << 18, Kind.HEARTBEAT: 0, Kind.END: 1 << 13}
MOST_CAUSE: Final = 1000  # characters of an End's cause
_HEADER: Final = struct.Struct("!BI")


class Welcome(msgspec.Struct, frozen=True):
    """The properties that the server must agree with, and the worker's limits."""

    version: str  # of moeserve: messages between versions are not compatible
    fingerprint: str  # of the model: see `fingerprint.py`
    ready: WorkerReady


class End(msgspec.Struct, frozen=True):
    """Why the gate ends the connection, or takes none."""

    cause: str
    by_itself: bool = False  # the worker has crashed: see WorkerExited


class FrameError(Exception):
    """Bytes that are no frame; the message says why."""


def encode_frame(kind: Kind, content: bytes = b"") -> bytes:
    return _HEADER.pack(kind, len(content)) + content


def encode_end(cause: str, *, by_itself: bool = False) -> bytes:
    return encode_frame(Kind.END, msgspec.msgpack.encode(End(cause[:MOST_CAUSE], by_itself)))


def decode_welcome(content: bytes) -> Welcome:
    """Raises FrameError if the content is no welcome."""
    try:
        return msgspec.msgpack.decode(content, type=Welcome)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"a malformed welcome: {error}") from error


def decode_end(content: bytes) -> End:
    """Raises FrameError if the content is no end."""
    try:
        return msgspec.msgpack.decode(content, type=End)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"a malformed end: {error}") from error


class FrameReader:
    """Cuts a stream of bytes into frames. Holds at most one unfinished frame, and what is fed."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Kind, bytes]]:
        """The frames that are complete with `data`; take all of them. Raises FrameError."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            number, length = _HEADER.unpack_from(self._buffer)
            try:
                kind = Kind(number)
            except ValueError:
                raise FrameError(f"there is no frame of kind {number}") from None
            if length > MOST_BYTES[kind]:
                raise FrameError(
                    f"a {kind.name} frame of {length} bytes; at most {MOST_BYTES[kind]} are allowed"
                )
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            content = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield kind, content
