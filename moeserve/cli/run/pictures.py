"""Reads the pictures of a question from files."""

from __future__ import annotations

import base64
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from moeserve.errors import UserError

MOST_BYTES: Final = 20 << 20  # in base64 slightly less than a request's limit of 32 MiB
SUFFIXES: Final = (".png", ".jpg", ".jpeg", ".webp", ".gif")
# A path in quotes, or without blanks but those behind a backslash, as a terminal writes a file that is dropped on it.
# A quote within a word is an apostrophe.
_PATH: Final = re.compile(
    r"""(?<!\S)'(?P<single>[^'\n]+)'|(?<!\S)"(?P<double>[^"\n]+)"|(?P<bare>(?:\\.|[^\s'"\\])+)""",
)
_PUNCTUATION: Final = ".,;:!?)"  # may follow a path within a sentence
_ESCAPED: Final = re.compile(r"\\(.)")


class Picture(NamedTuple):
    name: str
    url: str  # data:
    size: int  # bytes


def media_type_of(data: bytes) -> str | None:
    """Returns the media type by the first bytes; None if the server reads no such pictures."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return None


def picture_of(data: bytes, name: str) -> Picture | None:
    """Returns the picture; None if the bytes are not a picture."""
    media_type = media_type_of(data)
    if media_type is None:
        return None
    return Picture(name, f"data:{media_type};base64,{base64.b64encode(data).decode()}", len(data))


def read_picture(path: str) -> Picture:
    """Reads a picture's file and returns the picture. Raises UserError if it is missing, not a picture, or too large.
    Never blocks on a pipe or a device."""
    try:
        # `open` would block on a pipe without a writer.
        descriptor = os.open(Path(path).expanduser(), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise UserError(f"{path} is not a file; name a picture")
        with open(descriptor, "rb") as file:
            if found.st_size > MOST_BYTES:
                raise UserError(f"{path} is larger than {MOST_BYTES >> 20} MiB; make it smaller")
            data = file.read(MOST_BYTES)
    except (OSError, RuntimeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(f"{path} cannot be read: {why}") from error
    picture = picture_of(data, path)
    if picture is None:
        raise UserError(f"{path} is not a PNG, JPEG, WebP or GIF picture")
    return picture


def paths_in(text: str) -> Iterator[str]:
    """Returns the paths of existing picture files that the text names, in order."""
    for match in _PATH.finditer(text):
        path = match["single"] or match["double"] or _ESCAPED.sub(r"\1", match["bare"].rstrip(_PUNCTUATION))
        if path.lower().endswith(SUFFIXES) and _is_file(path):
            yield path


def _is_file(path: str) -> bool:
    try:
        return Path(path).expanduser().is_file()
    except (OSError, RuntimeError, ValueError):
        return False
