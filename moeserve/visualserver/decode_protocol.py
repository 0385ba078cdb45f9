"""The messages between the visual server and its decoding process: msgpack in frames."""

from __future__ import annotations

from typing import Final

import msgspec

from moeserve.visualserver.picture_size import SizeRule

MOST_PIXELS: Final = 50_000_000  # the most pixels of a picture before it is resized: phones take 48 million
MOST_MESSAGE: Final = 300  # characters


class Decode(msgspec.Struct, frozen=True, array_like=True):
    data: bytes  # a file
    rule: SizeRule


class Decoded(msgspec.Struct, frozen=True, tag=True):
    height: int = 0
    width: int = 0
    pixels: bytes = b""  # uint8 [height, width, 3]


class Refused(msgspec.Struct, frozen=True, tag=True):
    message: str  # for the client: the end of "the picture ..."


_REPLY: Final[msgspec.msgpack.Decoder[Decoded | Refused]] = msgspec.msgpack.Decoder(Decoded | Refused)
_REQUEST: Final[msgspec.msgpack.Decoder[Decode]] = msgspec.msgpack.Decoder(Decode)
encode: Final = msgspec.msgpack.Encoder().encode


def decode_request(frame: bytes) -> Decode:
    """Raises ValueError if the frame is no request."""
    return _REQUEST.decode(frame)


def decode_reply(frame: bytes) -> Decoded | Refused:
    """Raises ValueError if the frame is no reply."""
    return _REPLY.decode(frame)
