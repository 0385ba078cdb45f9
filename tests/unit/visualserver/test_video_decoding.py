"""The process that decodes videos: containers, chosen frames, and what hostile or damaged files come to."""

from __future__ import annotations

import io
import random
import struct
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import psutil
import pytest
from PIL import Image

from moeserve.messages.pictures import EncodePicture, VideoSettings
from moeserve.processes.sandbox import parent
from moeserve.visualserver import video_decoder
from moeserve.visualserver.media_decoder import PictureError
from moeserve.visualserver.picture_decoder import PictureDecoder
from moeserve.visualserver.picture_size import FrameRule
from moeserve.visualserver.video_decoder import VideoDecoder
from moeserve.visualserver.video_frames import Video
from tests.support.pictures.video_file import av, video_file

RULE = FrameRule(32, 4096, 2 * 4096 * 1024, 768 * 1024)
SHADES = [8 * index for index in range(30)]
PLAIN = video_file(SHADES)


@pytest.fixture(scope="module")
def decoder() -> Iterator[VideoDecoder]:
    pictures = PictureDecoder()
    made = VideoDecoder(pictures)
    yield made
    made.close()
    pictures.close()


def decoded(decoder: VideoDecoder, data: bytes, rule: FrameRule = RULE, **settings: float) -> Video:
    return decoder.decode(EncodePicture(1, data, video=VideoSettings(**settings)), rule)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("codec", "container"),
    [
        ("mpeg4", "mp4"),
        ("libx264", "mp4"),
        ("libx264", "mov"),
        ("libx265", "mp4"),
        ("libsvtav1", "mp4"),
        ("libvpx", "webm"),
        ("libvpx-vp9", "matroska"),
    ],
)
def test_chosen_frames(decoder: VideoDecoder, codec: str, container: str) -> None:
    """Three seconds of 10 frames each: six frames from the first to the last one, in the order in which they are
    shown."""
    if codec not in av.codecs_available:
        pytest.skip(f"this build of FFmpeg writes no {codec}")
    file = PLAIN if codec == "mpeg4" else video_file(SHADES, codec=codec, container=container)
    video = decoded(decoder, file)
    assert video.frames.shape == (6, 96, 160, 3)
    shades = video.frames.mean((1, 2, 3))
    assert np.allclose(shades, [SHADES[index] for index in (0, 6, 12, 17, 23, 29)], atol=6)
    assert np.allclose(video.times, [0.3, 1.45, 2.6])


def test_settings(decoder: VideoDecoder) -> None:
    """More frames of a second, fewer in all, an odd number, and frames that are shrunk together."""
    assert len(decoded(decoder, PLAIN, fps=10).frames) == 30
    few = decoded(decoder, PLAIN, max_frames=3)
    assert len(few.frames) == 4
    assert np.array_equal(few.frames[2], few.frames[3])
    assert few.times[1] == 2.9
    small = decoded(decoder, PLAIN, FrameRule(32, 4096, 2 * 18 * 1024, 768 * 1024))
    assert len(small.frames) // 2 * small.frames.shape[1] * small.frames.shape[2] <= 18 * 1024
    assert len(decoded(decoder, video_file([40])).frames) == 2


def test_a_phone_that_was_turned(decoder: VideoDecoder) -> None:
    """The file's matrix turns the frames clockwise by 90 degrees."""
    frames = np.zeros((4, 64, 96, 3), np.uint8)
    frames[:, :32] = 250  # white above
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as made:
        stream = made.add_stream("mpeg4", rate=8)
        stream.height, stream.width, stream.pix_fmt = 64, 96, "yuv420p"
        for frame in frames:
            made.mux(stream.encode(av.VideoFrame.from_ndarray(frame)))
        made.mux(stream.encode())
    data = file.getvalue()
    at = data.index(b"tkhd") + 4 + 40
    straight, turned = ((1, 0, 0, 0, 1, 0, 0, 0, 16384), (0, 1, 0, -1, 0, 0, 0, 0, 16384))
    assert data[at : at + 36] == struct.pack(">9i", *(65536 * one for one in straight))
    data = data[:at] + struct.pack(">9i", *(65536 * one for one in turned)) + data[at + 36 :]
    found = decoded(decoder, data).frames
    assert found.shape[1:3] == (96, 64)
    assert found[:, :, :24].mean() < 30
    assert found[:, :, 40:].mean() > 220


def test_a_gif(decoder: VideoDecoder) -> None:
    frames = [Image.new("L", (64, 64), shade) for shade in (0, 80, 160, 240)]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=500)
    video = decoded(decoder, file.getvalue())
    assert np.allclose(video.frames.mean((1, 2, 3)), [0, 80, 160, 240], atol=2)


def pictures(*sizes: tuple[int, int]) -> tuple[bytes, ...]:
    files = []
    for shade, size in enumerate(sizes):
        file = io.BytesIO()
        Image.new("L", size, 10 * shade).save(file, "PNG")
        files.append(file.getvalue())
    return tuple(files)


def test_a_list_of_frames(decoder: VideoDecoder) -> None:
    """All of them are read, at the distances that `fps` says."""
    message = EncodePicture(1, b"", video=VideoSettings(fps=4.0), frames=pictures(*[(160, 96)] * 3))
    video = decoder.decode(message, RULE)
    assert video.frames.shape == (4, 96, 160, 3)
    assert video.frames.mean((1, 2, 3)).tolist() == [0, 10, 20, 20]
    assert video.times == (0.125, 0.5)
    for files, cause in (
        (pictures((160, 96), (96, 160)), "has frames of different sizes"),
        ((b"none", b"none"), "is in no known format"),
        (pictures((8, 8)) * 5, "has 5 frames; at most 4"),
    ):
        tight = FrameRule(32, 4096, 18000, 768 * 1024)
        with pytest.raises(PictureError, match=cause):
            decoder.decode(EncodePicture(1, b"", video=VideoSettings(), frames=files), tight)


def sound() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as made:
        stream = made.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        made.mux(stream.encode(frame))
        made.mux(stream.encode())
    return file.getvalue()


def patched(box: bytes, offset: int, value: bytes, data: bytes = PLAIN) -> bytes:
    """A file with other bytes `offset` bytes behind the name of a box."""
    at = data.index(box) + len(box) + offset
    return data[:at] + value + data[at + len(value) :]


def gif(width: int, height: int) -> bytes:
    """A file that says so, without a pixel."""
    sizes = struct.pack("<HH", width, height)
    return b"GIF89a" + sizes + b"\0\0\0," + bytes(4) + sizes + b"\0\2\2D\1\0;"


HOSTILE = {
    "nothing": (b"", "is no MP4"),
    "text": (b"a video" * 99, "is no MP4"),
    "AVI": (b"RIFF\x10\0\0\0AVI LIST" + bytes(99), "is no MP4"),
    "a picture": (pictures((64, 64))[0], "is no MP4"),
    "no box": (b"\0\0\0\x18ftypmp42" + bytes(99), "cannot be read"),
    "cut off": (PLAIN[: len(PLAIN) // 2], "cannot be read"),
    "cut off behind its head": (
        video_file(SHADES, movflags="frag_keyframe+empty_moov")[:4000],
        "cannot be read",
    ),
    "sound alone": (sound(), "it has no video"),
    "no size": (gif(0, 0), "cannot be read"),
    "more pixels than are taken": (gif(8192, 4096), "8192 x 4096 pixels; 9437184 at most"),
    "65535 pixels a side": (gif(65535, 65535), "no size|pixels"),
    "billions of frames": (
        patched(b"stsz", 4, struct.pack(">II", 1, 0xFFFFFFFF)),
        "cannot be read|memory|long",
    ),
    "billions of frames in a table": (patched(b"stsz", 8, b"\xff\xff\xff\xff"), "cannot be read|memory|long"),
    "ten hours": (video_file([0] * 40, fps=Fraction(1, 900)), "it is 36000 s long; at most 3600 s"),
    "a frame a year": (patched(b"stts", 8, struct.pack(">II", 30, 0x7FFFFFFF)), "s long|cannot be read"),
    "a codec that is not read": (
        video_file([0], fps=25, codec="mpeg2video", container="matroska"),
        "codec|cannot",
    ),
    "WebM, cut off in its head": (b"\x1aE\xdf\xa3\x01\0\0\0\0\0\0\x1f" + bytes(40), "cannot be read"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(decoder: VideoDecoder, name: str) -> None:
    data, cause = HOSTILE[name]
    with pytest.raises(PictureError, match=cause):
        decoded(decoder, data)
    assert len(decoded(decoder, PLAIN).frames) == 6


def process_of(decoder: VideoDecoder) -> psutil.Process:
    child = decoder._sandbox._child
    assert child is not None
    return psutil.Process(child.process.pid)


def test_damaged_anywhere(decoder: VideoDecoder) -> None:
    """A video or a sentence, and the process stays."""
    decoded(decoder, PLAIN)
    process = process_of(decoder)
    chance = random.Random(9)
    for _ in range(60):
        data = bytearray(PLAIN)
        for _ in range(chance.choice([1, 3, 20])):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            found = decoded(decoder, bytes(data))
            assert 2 <= len(found.frames) == 2 * len(found.times)
        except PictureError:
            continue
    assert process.is_running()
    assert process.memory_info().rss < 1 << 30


def test_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A video that takes too long ends its process, and the next one gets another."""
    monkeypatch.setattr(parent, "PATIENCE", 200)  # it gets its CPU time, however busy the machine is
    pictures_decoder = PictureDecoder()
    decoder = VideoDecoder(pictures_decoder, timeout=0.1)
    try:
        many = video_file([37 * index % 250 for index in range(1500)], fps=25, size=(288, 512))
        with pytest.raises(
            PictureError, match=r"takes too long to decode: it did not decode it within 0.1 s"
        ):
            decoded(decoder, many, max_frames=4)
        assert len(decoded(decoder, PLAIN).frames) == 6
    finally:
        decoder.close()
        pictures_decoder.close()


def test_without_the_extra(decoder: VideoDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_decoder, "find_spec", lambda name: None)
    with pytest.raises(PictureError, match=r"lacks PyAV \(pip install 'moeserve\[video\]'\)"):
        decoded(decoder, PLAIN)
