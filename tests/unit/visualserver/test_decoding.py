"""The process that decodes pictures: formats, and what hostile or damaged files come to."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import psutil
import pytest
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from moeserve.processes.sandbox import parent
from moeserve.visualserver.media_decoder import PictureError
from moeserve.visualserver.picture_decoder import PictureDecoder
from moeserve.visualserver.picture_size import StretchRule
from tests.support.pictures.broken_pictures import broken, file_of, whole_files

RULE = StretchRule(32, 1024, 4194304)


@pytest.fixture(scope="module")
def decoder() -> Iterator[PictureDecoder]:
    made = PictureDecoder()
    yield made
    made.close()


def colours(height: int = 64, width: int = 96) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 256, (height, width, 3), dtype=np.uint8)


def chunk_of(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def with_chunk(file: bytes, name: bytes, body: bytes) -> bytes:
    """A PNG file with one more chunk behind its head."""
    return file[:33] + chunk_of(name, body) + file[33:]


def png(width: int, height: int, data: bytes, *, mode: bytes = b"\x08\x02") -> bytes:
    """A PNG file that says whatever is asked of it."""
    head = struct.pack(">II", width, height) + mode + b"\0\0\0"
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        (chunk_of(b"IHDR", head), chunk_of(b"IDAT", data), chunk_of(b"IEND", b""))
    )


@pytest.mark.parametrize("format", ["PNG", "WEBP", "GIF", "JPEG"])
def test_formats(decoder: PictureDecoder, format: str) -> None:
    """Lossless ones bit for bit, a GIF by its first frame."""
    picture = Image.fromarray(colours())
    if format == "GIF":
        picture = picture.quantize(256)
        found = decoder.decode(
            file_of(picture, format, save_all=True, append_images=[Image.new("P", picture.size)]), RULE
        )
        assert np.array_equal(found, np.asarray(picture.convert("RGB")))
        return
    found = decoder.decode(file_of(picture, format, lossless=True), RULE)
    if format == "JPEG":
        assert found.shape == (64, 96, 3)
    else:
        assert np.array_equal(found, colours())


@pytest.mark.parametrize("mode", ["L", "1", "P", "LA", "RGBA", "I;16", "CMYK"])
def test_modes(decoder: PictureDecoder, mode: str) -> None:
    """What is no RGB becomes it; what is transparent lies on white."""
    grey = np.full((64, 128), 255, np.uint8)
    if mode == "I;16":
        picture = Image.fromarray(grey.astype(np.uint16) * 256)
    elif mode in ("LA", "RGBA"):
        picture = Image.new(mode, (128, 64), 0)  # transparent, and black
    else:
        picture = Image.fromarray(grey).convert(mode)
    found = decoder.decode(file_of(picture, "JPEG" if mode == "CMYK" else "PNG"), RULE)
    assert found.shape == (64, 128, 3)
    assert found.min() >= 254


def test_turned_and_resized_as_pillow_does(decoder: PictureDecoder) -> None:
    picture = Image.fromarray(colours(100, 333))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    found = decoder.decode(file_of(picture, "PNG", exif=exif), RULE)
    upright = picture.transpose(Image.Transpose.ROTATE_270)
    height, width = RULE.resized(upright.height, upright.width)
    assert np.array_equal(found, np.asarray(upright.resize((width, height), Image.Resampling.BICUBIC)))


def halves(size: tuple[int, int] = (64, 96)) -> Image.Image:
    """Red above, blue below."""
    picture = Image.new("RGB", size, "red")
    picture.paste("blue", (0, size[1] // 2, *size))
    return picture


def with_text(nbytes: int) -> PngInfo:
    info = PngInfo()
    info.add_text("workflow", "x" * nbytes, zip=True)
    return info


def raw_profile(written: str) -> PngInfo:
    """EXIF data in hexadecimal, as ImageMagick writes them."""
    info = PngInfo()
    info.add_text("Raw profile type exif", f"\nexif\n      20\n{written}\n")
    return info


def turned(value: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


FRAMES = [Image.new("RGB", (64, 64), "red"), Image.new("RGB", (64, 64), "green")]
PALETTE = halves().quantize(4)
DEEP = {2: struct.pack(">HHH", 0xFFFF, 0x00FF, 0x12), 6: struct.pack(">HHHH", 0xFFFF, 0x00FF, 0x12, 0xFFFF)}
RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)
# Pictures that clients send, and the colours of their first and last pixels.
ODD = {
    "a phone's JPEG, upside down": (file_of(halves(), "JPEG", exif=turned(3)), BLUE, RED),
    "a phone's JPEG, lying": (file_of(halves(), "JPEG", exif=turned(6)), BLUE, RED),
    "WebP, lying": (file_of(halves(), "WEBP", lossless=True, exif=turned(8)), RED, BLUE),
    "an impossible turn": (file_of(halves(), "JPEG", exif=turned(99)), RED, BLUE),
    "damaged EXIF": (file_of(halves(), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff"), RED, BLUE),
    "damaged EXIF in a PNG": (with_chunk(file_of(halves(), "PNG"), b"eXIf", b"b'Exif"), RED, BLUE),
    "damaged EXIF in a PNG's text": (file_of(halves(), "PNG", pnginfo=raw_profile("zz")), RED, BLUE),
    "damaged EXIF in a WebP": (file_of(halves(), "WEBP", lossless=True, exif=b"junk"), RED, BLUE),
    "animated WebP": (file_of(FRAMES[0], "WEBP", save_all=True, append_images=FRAMES[1:]), RED, RED),
    "animated PNG": (file_of(FRAMES[0], "PNG", save_all=True, append_images=FRAMES[1:]), RED, RED),
    "two pictures in a phone's JPEG": (
        file_of(halves(), "MPO", save_all=True, append_images=FRAMES),
        RED,
        BLUE,
    ),
    "CMYK": (file_of(halves().convert("CMYK"), "JPEG"), RED, BLUE),
    "a palette with a transparent colour": (file_of(PALETTE, "PNG", transparency=0), WHITE, BLUE),
    "a palette with transparencies": (file_of(PALETTE, "PNG", transparency=b"\0\xff"), WHITE, BLUE),
    "one pixel": (file_of(Image.new("RGB", (1, 1), "blue"), "PNG"), BLUE, BLUE),
    "very wide": (file_of(Image.new("RGB", (3900, 20), "blue"), "PNG"), BLUE, BLUE),
    "16 bits a channel": (
        png(64, 64, zlib.compress((b"\0" + 64 * DEEP[2]) * 64), mode=b"\x10\x02"),
        RED,
        RED,
    ),
    "16 bits and transparency": (
        png(64, 64, zlib.compress((b"\0" + 64 * DEEP[6]) * 64), mode=b"\x10\x06"),
        RED,
        RED,
    ),
    "a generator's settings": (file_of(halves(), "PNG", pnginfo=with_text(3_000_000)), RED, BLUE),
    "bytes behind the end": (file_of(halves(), "JPEG") + bytes(500), RED, BLUE),
}


@pytest.mark.parametrize("value", range(1, 9))
def test_every_turn(decoder: PictureDecoder, value: int) -> None:
    """As Pillow's own."""
    picture = Image.fromarray(colours(64, 96))
    data = file_of(picture, "PNG", exif=turned(value))
    with Image.open(io.BytesIO(data)) as opened:
        expected = np.asarray(ImageOps.exif_transpose(opened))
    assert np.array_equal(decoder.decode(data, RULE), expected)


@pytest.mark.parametrize("name", ODD)
def test_odd_ones(decoder: PictureDecoder, name: str) -> None:
    data, first, last = ODD[name]
    found = decoder.decode(data, RULE).astype(int)
    assert np.abs(found[0, 0] - first).max() <= 3
    assert np.abs(found[-1, -1] - last).max() <= 3


HUGE = zlib.compress(bytes(1 << 20))


def text_of_100_mb() -> bytes:
    return file_of(Image.fromarray(colours()), "PNG", pnginfo=with_text(100_000_000))


# What takes long to make is made by the test: each process that runs tests reads this table.
HOSTILE: dict[str, tuple[bytes | Callable[[], bytes], str | None]] = {
    "nothing": (b"", "no known format"),
    "a text": (b"a picture " * 100, "no known format"),
    "a drawing": (b" <svg/>" * 100, "is SVG, which is not read; PNG, JPEG"),
    "a phone's": (b"\0\0\0\x24ftypheic" + bytes(100), "is HEIC, which is not read"),
    "an icon": (b"\0\0\x01\0\x01\0" + bytes(100), "is ICO, which is not read"),
    "another format": (file_of(Image.fromarray(colours()), "BMP"), "is BMP, which is not read"),
    "3,600 million pixels": (png(60000, 60000, HUGE), "60000 x 60000 pixels; 50000000 at most"),
    "more pixels than said": (lambda: png(64, 64, zlib.compress(bytes(50 << 20))), None),
    "fewer pixels than said": (png(4096, 4096, HUGE), "cannot be read"),
    "a text of 100 MB": (text_of_100_mb, "cannot be read"),
    "no deflate": (png(64, 64, b"x" * 1000), "cannot be read"),
    "too narrow": (png(1, 10000, HUGE), "at most 200 times"),
    "half a JPEG": (file_of(Image.fromarray(colours()), "JPEG")[:800], "truncated"),
    "half a GIF": (file_of(Image.fromarray(colours()), "GIF")[:2000], "cannot be read"),
    "half a WebP": (file_of(Image.fromarray(colours()), "WEBP")[:400], "cannot be read"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(decoder: PictureDecoder, name: str) -> None:
    """Each is refused in words; the process stays for the next."""
    file, words = HOSTILE[name]
    data = file() if callable(file) else file
    if words is None:  # what is too much is not read
        decoder.decode(data, RULE)
        return
    with pytest.raises(PictureError, match=words):
        decoder.decode(data, RULE)


def test_damaged_anywhere(decoder: PictureDecoder) -> None:
    """300 files with wrong bytes: decoded or refused, and a good one after them is read."""
    rng = random.Random(17)
    picture = Image.fromarray(colours(32, 48))
    whole = [file_of(picture, format) for format in ("PNG", "JPEG", "WEBP", "GIF")]
    for number in range(300):
        data = bytearray(whole[number % len(whole)])
        for _ in range(rng.randrange(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            decoder.decode(bytes(data), RULE)
        except PictureError as error:
            assert len(str(error)) < 400  # noqa: PT017
    assert decoder.decode(whole[0], RULE).shape[2] == 3


@pytest.mark.slow
def test_a_thousand_broken_files(decoder: PictureDecoder) -> None:
    """None ends the process that decodes, or has it keep memory, and a good one is read behind them."""
    rng = random.Random(44)
    picture = Image.fromarray(colours(200, 300))
    files = whole_files(picture)
    decoder.decode(files[0], RULE)
    child = decoder._sandbox._child
    assert child is not None
    refused = 0
    for _ in range(1000):
        try:
            decoder.decode(broken(rng, files), RULE)
        except PictureError:
            refused += 1
    assert 100 < refused < 1000
    assert decoder._sandbox._child is child
    assert psutil.Process(child.process.pid).memory_info().rss < 256 << 20
    assert decoder.decode(files[0], RULE).shape == (192, 288, 3)


def test_a_process_that_was_killed(decoder: PictureDecoder) -> None:
    decoder.decode(file_of(Image.fromarray(colours()), "PNG"), RULE)
    child = decoder._sandbox._child
    assert child is not None
    child.process.kill()
    child.process.wait()
    assert decoder.decode(file_of(Image.fromarray(colours()), "PNG"), RULE).shape == (64, 96, 3)


def test_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of CPU time that the picture exceeds twice over."""
    monkeypatch.setattr(parent, "PATIENCE", 200)  # it gets its CPU time, however busy the machine is
    decoder = PictureDecoder(timeout=0.25)
    data = file_of(Image.new("RGB", (5000, 5000)), "PNG")
    with pytest.raises(PictureError, match="takes too long"):
        decoder.decode(data, RULE)
    decoder.close()
