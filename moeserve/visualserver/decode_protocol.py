"""The messages between the visual server and its decoding processes: msgpack in frames."""

from __future__ import annotations

from typing import Final

import msgspec

from moeserve.messages.pictures import VideoSettings
from moeserve.visualserver.picture_size import FrameRule, SizeRule

MOST_PIXELS: Final = 50_000_000  # the most pixels of a picture before it is resized: phones take 48 million
MOST_VIDEO_PIXELS: Final = 4096 * 2304  # the same of a video's frame
MOST_VIDEO_SECONDS: Final = 3600.0
MOST_CODED_FRAMES: Final = 240_000  # an hour of 60 frames a second, and more
# Address space in addition to the process's own: codecs keep up to 17 frames, of 14 MB each at the most.
VIDEO_MEMORY_BYTES: Final = 1 << 30
MOST_MESSAGE: Final = 300  # characters


class Decode(msgspec.Struct, frozen=True, array_like=True):
    data: bytes  # a file
    rule: SizeRule


class DecodeVideo(msgspec.Struct, frozen=True, array_like=True):
    data: bytes  # a file
    rule: FrameRule
    settings: VideoSettings


class Decoded(msgspec.Struct, frozen=True, tag=True):
    height: int = 0
    width: int = 0
    pixels: bytes = b""  # uint8 [height, width, 3]


class Refused(msgspec.Struct, frozen=True, tag=True):
    message: str  # for the client: the end of "the picture ..." or "the video ..."


class VideoDecoded(msgspec.Struct, frozen=True, tag=True):
    frames: int = 0
    height: int = 0
    width: int = 0
    pixels: bytes = b""  # uint8 [frames, height, width, 3]
    seconds: tuple[float, ...] = ()  # when each frame is shown


_REPLY: Final[msgspec.msgpack.Decoder[Decoded | Refused]] = msgspec.msgpack.Decoder(Decoded | Refused)
_REQUEST: Final[msgspec.msgpack.Decoder[Decode]] = msgspec.msgpack.Decoder(Decode)
_VIDEO_REPLY: Final[msgspec.msgpack.Decoder[VideoDecoded | Refused]] = msgspec.msgpack.Decoder(
    VideoDecoded | Refused
)
_VIDEO_REQUEST: Final[msgspec.msgpack.Decoder[DecodeVideo]] = msgspec.msgpack.Decoder(DecodeVideo)
encode: Final = msgspec.msgpack.Encoder().encode


def decode_request(frame: bytes) -> Decode:
    """Returns the request in the frame. Raises ValueError if the frame has none."""
    return _REQUEST.decode(frame)


def decode_reply(frame: bytes) -> Decoded | Refused:
    """Raises ValueError if the frame is no reply."""
    return _REPLY.decode(frame)


def decode_video_request(frame: bytes) -> DecodeVideo:
    """Raises ValueError if the frame is no request."""
    return _VIDEO_REQUEST.decode(frame)


def decode_video_reply(frame: bytes) -> VideoDecoded | Refused:
    """Raises ValueError if the frame is no reply."""
    return _VIDEO_REPLY.decode(frame)
