"""The process that decodes untrusted pictures: `python -m moeserve.visualserver.decode_process`, in a Sandbox.

Pillow reads only the formats in FORMATS. A picture is turned as its EXIF data says, converted to RGB and resized
bicubically or bilinearly, as in transformers' processors. Transparent pixels become white, as in vLLM: on black, most
diagrams vanish.
"""

from __future__ import annotations

import io
from importlib import import_module
from typing import Final

import numpy as np
from PIL import ExifTags, Image, PngImagePlugin, UnidentifiedImageError

from moeserve.messages.pictures import MAX_PICTURE_BYTES
from moeserve.processes.sandbox import child
from moeserve.processes.sandbox.frames import receive_frame, send_frame
from moeserve.visualserver.decode_protocol import (
    MOST_MESSAGE,
    MOST_PIXELS,
    Decode,
    Decoded,
    Refused,
    decode_request,
    encode,
)
from moeserve.visualserver.picture_size import PadRule, SizeRule, SquareRule, StretchRule, TileRule

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")  # of a file with several frames, the first is read
# Other files that clients send, recognised by bytes at an offset.
_OTHERS: Final = (
    ("HEIC", 4, (b"ftyphei", b"ftyphev", b"ftypmif1", b"ftypmsf1")),
    ("AVIF", 4, (b"ftypavi",)),
    ("TIFF", 0, (b"II*\0", b"MM\0*")),
    ("BMP", 0, (b"BM",)),
    ("PDF", 0, (b"%PDF-",)),
    ("SVG", 0, (b"<svg", b"<?xml")),
    ("a web page", 0, (b"<!DOCTYPE", b"<!doctype", b"<html")),
    ("JPEG 2000", 0, (b"\0\0\0\x0cjP  ",)),
    ("ICO", 0, (b"\0\0\x01\0",)),
    ("JPEG XL", 0, (b"\xff\x0a", b"\0\0\0\x0cJXL ")),
)
# Address space in addition to the process's own: Pillow keeps 4 bytes per pixel, and a conversion holds two copies of a
# picture.
MEMORY_BYTES: Final = 768 << 20
# The most bytes of one text in a PNG, which Pillow unpacks. Programs that generate pictures keep all their settings in
# such a text, which may exceed Pillow's own limit of 1 MiB. All texts together may have 64 MiB.
MOST_TEXT_BYTES: Final = 64 << 20
# How a picture is turned by the value of its EXIF data's Orientation.
_TURNS: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Pillow's modules for these formats, and for the parts that they contain: EXIF data, and the several pictures in a
# phone's JPEG.
_MODULES: Final = ("Png", "Jpeg", "WebP", "Gif", "Tiff", "Mpo")


def main() -> None:
    channel = child.begin("pictures")
    _load_the_rest()
    child.confine(MEMORY_BYTES)
    send_frame(channel, encode(Decoded()))  # ready
    while True:
        try:
            request = decode_request(receive_frame(channel, MAX_PICTURE_BYTES + 1024))
        except (EOFError, ConnectionError):
            return
        send_frame(channel, encode(decode(request)))


def decode(request: Decode) -> Decoded | Refused:
    """Decodes and resizes one picture."""
    try:
        with Image.open(io.BytesIO(request.data), formats=FORMATS) as picture:
            if picture.width * picture.height > MOST_PIXELS:
                return Refused(
                    f"has {picture.width} x {picture.height} pixels; {MOST_PIXELS} at most are taken"
                )
            pixels = _resized(picture, request.rule)
    except UnidentifiedImageError:
        return Refused(f"{_named(request.data)}; {', '.join(FORMATS)} are read")
    except MemoryError:
        return Refused("takes too much memory to decode; make it smaller, or send it as PNG or JPEG")
    except Exception as error:  # noqa: BLE001  parsers of damaged files raise anything
        return Refused(f"cannot be read: {str(error) or type(error).__name__}"[:MOST_MESSAGE])
    return Decoded(pixels.shape[0], pixels.shape[1], pixels.tobytes())


def _named(data: bytes) -> str:
    """Returns a text that names the format of a file that is not in FORMATS."""
    kinds = [kind for kind, at, begin in _OTHERS if data[at : at + 64].lstrip().startswith(begin)]
    return f"is {kinds[0]}, which is not read" if kinds else "is in no known format"


def _resized(picture: Image.Image, rule: SizeRule) -> np.ndarray:
    """Returns uint8 [height, width, 3]. Raises ValueError for a size that `rule` does not accept, and Pillow's
    errors."""
    rule.resized(picture.height, picture.width)  # raises for a bad size before the picture is decoded
    turned = _rgb(_upright(picture))
    height, width = rule.resized(turned.height, turned.width)
    is_linear = isinstance(rule, TileRule | SquareRule)
    sampling = Image.Resampling.BILINEAR if is_linear else Image.Resampling.BICUBIC
    if not isinstance(rule, PadRule | TileRule):
        return np.asarray(turned.resize((width, height), sampling))
    rows, columns = rule.drawn(turned.height, turned.width)
    canvas = np.zeros((height, width, 3), np.uint8)
    canvas[:rows, :columns] = np.asarray(turned.resize((columns, rows), sampling))
    if isinstance(rule, TileRule) and height > rule.tile:
        canvas[-rule.tile :, : rule.tile] = np.asarray(turned.resize((rule.tile, rule.tile), sampling))
    return canvas


def _upright(picture: Image.Image) -> Image.Image:
    """Turns the picture as its EXIF data says. EXIF data that cannot be read say nothing."""
    picture.load()  # a PNG's EXIF data may follow its pixels, whose errors are not to be passed over
    try:
        orientation = picture.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # noqa: BLE001  parsers of damaged data raise anything
        return picture
    turn = _TURNS.get(orientation) if isinstance(orientation, int) else None
    return picture if turn is None else picture.transpose(turn)


def _rgb(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith("I;16"):  # grey values of 16 bits, which `convert` would clip at 255
        return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8)).convert("RGB")
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    above = picture.convert("RGBA")
    below = Image.new("RGBA", above.size, "white")
    below.alpha_composite(above)
    return below.convert("RGB")


def _load_the_rest() -> None:
    """Loads the parts that Pillow loads on first use: its codecs, and the tables of conversions."""
    for name in _MODULES:
        import_module(f"PIL.{name}ImagePlugin")
    Image.MAX_IMAGE_PIXELS = None  # MOST_PIXELS replaces this limit
    PngImagePlugin.MAX_TEXT_CHUNK = MOST_TEXT_BYTES
    rule = StretchRule(8, 64, 4096)
    for name in FORMATS:
        for mode in ("RGB", "P", "RGBA"):
            if name == "JPEG" and mode != "RGB":
                continue
            file = io.BytesIO()
            Image.new(mode, (16, 24)).save(file, name)
            decode(Decode(file.getvalue(), rule))
            decode(Decode(file.getvalue()[:-30], rule))


if __name__ == "__main__":
    main()
