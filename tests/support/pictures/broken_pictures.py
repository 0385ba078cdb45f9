"""Picture files that are damaged at random."""

from __future__ import annotations

import io
import random

from PIL import Image


def file_of(picture: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, format, **options)
    return file.getvalue()


def whole_files(picture: Image.Image) -> list[bytes]:
    """The picture in every format and mode that is read, with EXIF data and with several frames."""
    exif = Image.Exif()
    exif[0x0112] = 3
    frames = {"save_all": True, "append_images": [Image.new("RGB", picture.size, "red")] * 3}
    return [
        *(file_of(picture, format) for format in ("PNG", "JPEG", "WEBP", "GIF")),
        file_of(picture, "JPEG", progressive=True, exif=exif),
        file_of(picture, "WEBP", lossless=True, exif=exif),
        *(file_of(picture, format, **frames) for format in ("PNG", "WEBP", "GIF")),
        *(file_of(picture.convert(mode), "PNG") for mode in ("P", "1", "LA", "RGBA", "I;16", "L")),
        *(file_of(picture.convert(mode), "JPEG") for mode in ("CMYK", "L")),
    ]


def broken(rng: random.Random, files: list[bytes]) -> bytes:
    """Returns a file that is cut, joined with another's end, or has four bytes overwritten or a part repeated."""
    data = rng.choice(files)
    at, behind = sorted((rng.randrange(len(data)), rng.randrange(len(data))))
    match rng.randrange(4):
        case 0:
            return data[:behind]
        case 1:
            other = rng.choice(files)
            return data[:behind] + other[rng.randrange(len(other)) :]
        case 2:
            value = rng.choice((0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, rng.getrandbits(32)))
            field = value.to_bytes(4, rng.choice(("little", "big")))
            return data[:at] + field + data[at + 4 :]
        case _:
            return data[:behind] + data[at:behind] * rng.randrange(1, 50) + data[behind:]
