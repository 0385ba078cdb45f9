"""The process that decodes untrusted videos: `python -m moeserve.visualserver.video_process`, in a Sandbox.

PyAV (FFmpeg) reads only the containers and codecs that are listed here. Frames are chosen and resized as in Qwen3-VL's
processor: `fps` of a second, at equal distances from the first to the last one. They are turned as the file says.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, Final

import av
import numpy as np
from av.error import FFmpegError
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from msgspec.structs import replace
from PIL import Image

from moeserve.messages.pictures import MAX_PICTURE_BYTES, VideoSettings
from moeserve.processes.sandbox import child
from moeserve.processes.sandbox.frames import receive_frame, send_frame
from moeserve.visualserver.decode_protocol import (
    MOST_CODED_FRAMES,
    MOST_MESSAGE,
    MOST_VIDEO_PIXELS,
    MOST_VIDEO_SECONDS,
    VIDEO_MEMORY_BYTES,
    DecodeVideo,
    Refused,
    VideoDecoded,
    decode_video_request,
    encode,
)
from moeserve.visualserver.picture_size import FrameRule
from moeserve.visualserver.video_frames import chosen_frames

# FFmpeg's name of a container, by bytes at an offset.
CONTAINERS: Final = (
    ("mp4", 4, b"ftyp"),  # and MOV
    ("mp4", 4, b"moov"),
    ("mp4", 4, b"wide"),
    ("mp4", 4, b"mdat"),
    ("matroska", 0, b"\x1aE\xdf\xa3"),  # and WebM
    ("gif", 0, b"GIF8"),
)
CODECS: Final = ("h264", "hevc", "libdav1d", "av1", "vp8", "vp9", "mpeg4", "mjpeg", "gif")
UNKNOWN_FPS: Final = 24.0  # of a file that does not say it, as in transformers


def main() -> None:
    channel = child.begin("videos")
    _load_the_rest()
    child.confine(VIDEO_MEMORY_BYTES)
    send_frame(channel, encode(VideoDecoded()))  # ready
    while True:
        try:
            request = decode_video_request(receive_frame(channel, MAX_PICTURE_BYTES + 1024))
        except (EOFError, ConnectionError):
            return
        send_frame(channel, encode(decode(request)))


def decode(request: DecodeVideo) -> VideoDecoded | Refused:
    """Decodes a video's chosen frames and resizes them."""
    try:
        total, fps = _count(request.data)
        chosen = chosen_frames(
            total, fps, request.settings.fps, min(request.settings.max_frames, request.rule.most_frames)
        )
        rule = replace(request.rule, num_frames=max(2, len(chosen)))
        frames = np.stack(list(_resized(request.data, chosen, rule)))
    except MemoryError:
        return Refused("takes too much memory to decode; make it smaller")
    except (FFmpegError, ValueError) as error:
        return Refused(f"cannot be read: {_words(error)}"[:MOST_MESSAGE])
    except Exception as error:  # noqa: BLE001  bindings of damaged files raise anything
        return Refused(f"cannot be read: {str(error) or type(error).__name__}"[:MOST_MESSAGE])
    seconds = tuple(float(index) / fps for index in chosen)
    count, height, width, _ = frames.shape
    return VideoDecoded(count, height, width, frames.tobytes(), seconds)


def _words(error: Exception) -> str:
    """Returns the cause without FFmpeg's file name."""
    text = error.strerror if isinstance(error, FFmpegError) and error.strerror else str(error)
    return text or type(error).__name__


def _open(data: bytes) -> av.container.InputContainer:
    """Raises ValueError for a container that is not read, and FFmpeg's errors."""
    name = next((name for name, at, begin in CONTAINERS if data[at:].startswith(begin)), None)
    if name is None:
        raise ValueError("it is no MP4, MOV, WebM, Matroska or GIF file")
    return av.open(io.BytesIO(data), "r", format=name, options={"codec_whitelist": ",".join(CODECS)})


def _stream(container: av.container.InputContainer) -> VideoStream:
    """Returns the video. Raises ValueError for a file without one, or with one that is too large."""
    if not container.streams.video:
        raise ValueError("it has no video")
    stream = container.streams.video[0]
    _check_pixels(stream.width, stream.height)
    if stream.codec_context.name not in CODECS:
        raise ValueError(f"its codec {stream.codec_context.name} is not read")
    stream.codec_context.thread_count = 1  # this process may start no threads
    return stream


def _check_pixels(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise ValueError("its frames have no size")
    if width * height > MOST_VIDEO_PIXELS:
        raise ValueError(
            f"it has {width} x {height} pixels; {MOST_VIDEO_PIXELS} at most are taken; encode it in a "
            "smaller size"
        )


def _count(data: bytes) -> tuple[int, float]:
    """Returns the number of frames, whatever the file's header says, and of frames in a second. Raises ValueError for
    too many, and FFmpeg's errors."""
    with _open(data) as container:
        stream = _stream(container)
        rate = stream.average_rate or stream.guessed_rate
        fps = float(rate) if rate else UNKNOWN_FPS
        total = 0
        for packet in container.demux(stream):
            if packet.size == 0:  # the last one, which ends the decoding
                continue
            if packet.is_corrupt:
                raise ValueError("it is cut off, or damaged")
            total += 1
            if total > MOST_CODED_FRAMES:
                raise ValueError(f"it has more than {MOST_CODED_FRAMES} frames")
    if total == 0:
        raise ValueError("it has no frames")
    if total / fps > MOST_VIDEO_SECONDS:
        raise ValueError(
            f"it is {total / fps:.0f} s long; at most {MOST_VIDEO_SECONDS:.0f} s are taken; cut it"
        )
    return total, fps


def _resized(
    data: bytes, chosen: list[int], rule: FrameRule
) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
    """Yields the chosen frames as uint8 [height, width, 3] in the first one's size. Raises ValueError if some are
    missing, and FFmpeg's errors."""
    wanted = iter(chosen)
    index: int | None = next(wanted)
    size: tuple[int, int] | None = None
    with _open(data) as container:
        for at, frame in enumerate(container.decode(_stream(container))):
            if at != index:
                continue
            picture = _upright(frame)
            size = size or rule.resized(picture.height, picture.width)
            yield np.asarray(picture.resize((size[1], size[0]), Image.Resampling.BICUBIC))
            index = next(wanted, None)
            if index is None:
                return
    raise ValueError("it is cut off, or damaged: not all of its frames can be decoded")


def _upright(frame: VideoFrame) -> Image.Image:
    _check_pixels(frame.width, frame.height)
    picture = Image.fromarray(frame.to_ndarray(format="rgb24", threads=1))
    turns = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, -180: Image.Transpose.ROTATE_180}
    turn = (turns | {-90: Image.Transpose.ROTATE_270}).get(frame.rotation)
    return picture if turn is None else picture.transpose(turn)


def _load_the_rest() -> None:
    """Loads what PyAV and Pillow load on first use: their modules, and FFmpeg's tables."""
    av.logging.set_level(None)
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for _ in range(4):
            container.mux(stream.encode(VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8))))
        container.mux(stream.encode())
    rule = FrameRule(32, 4096, 1 << 20, 1 << 20)
    for data in (file.getvalue(), file.getvalue()[:-30], b"none"):
        decode(DecodeVideo(data, rule, VideoSettings()))


if __name__ == "__main__":
    main()
