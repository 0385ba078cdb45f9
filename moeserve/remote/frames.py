"""The frames that link and gate exchange within TLS: kind, length, content.

The gate sends the first frame: a Welcome, or an End with the reason for refusing. Then both send the bytes of rpyc's
connection as Data, and a Heartbeat after some time without a frame. An End is the last frame.
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


# Limits of a frame's content. A longer frame ends the connection before any of it is stored.
MOST_BYTES: Final = {Kind.WELCOME: 1 << 20, Kind.DATA: 1 << 18, Kind.HEARTBEAT: 0, Kind.END: 1 << 13}
MOST_CAUSE: Final = 1000  # characters of an End's cause
_HEADER: Final = struct.Struct("!BI")


class Welcome(msgspec.Struct, frozen=True):
    """The properties that must match the server's, and the worker's limits."""

    version: str  # of moeserve: messages between versions are not compatible
    fingerprint: str  # of the model: see `fingerprint.py`
    ready: WorkerReady


class End(msgspec.Struct, frozen=True):
    """Why the gate ends or refuses the connection."""

    cause: str
    by_itself: bool = False  # the worker has crashed: see WorkerExited


class FrameError(Exception):
    """Malformed bytes; the message says why."""


def encode_frame(kind: Kind, content: bytes = b"") -> bytes:
    return _HEADER.pack(kind, len(content)) + content


def encode_end(cause: str, *, by_itself: bool = False) -> bytes:
    return encode_frame(Kind.END, msgspec.msgpack.encode(End(cause[:MOST_CAUSE], by_itself)))


def decode_welcome(content: bytes) -> Welcome:
    """Decodes a Welcome. Raises FrameError for other content."""
    try:
        return msgspec.msgpack.decode(content, type=Welcome)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"a malformed welcome: {error}") from error


def decode_end(content: bytes) -> End:
    """Decodes an End. Raises FrameError for other content."""
    try:
        return msgspec.msgpack.decode(content, type=End)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"a malformed end: {error}") from error


class FrameReader:
    """Splits a stream of bytes into frames. Stores at most one unfinished frame plus the bytes of the last `feed`."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Kind, bytes]]:
        """Yields the frames that are complete with `data`; consume all of them. Raises FrameError."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            number, length = _HEADER.unpack_from(self._buffer)
            try:
                kind = Kind(number)
            except ValueError:
                raise FrameError(f"there is no frame of kind {number}") from None
            if length > MOST_BYTES[kind]:
                raise FrameError(
                    f"a {kind.name} frame of {length} bytes; at most {MOST_BYTES[kind]} are allowed; install one "
                    "version on both machines"
                )
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            content = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield kind, content
