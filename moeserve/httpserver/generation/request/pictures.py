"""Pictures in conversations.

Chat templates take texts, so a random mark stands for each picture in a message's text. In the rendered text each mark
is replaced by the model's placeholder tokens and the picture's embeddings. A placeholder that a client spells out is
not a mark, so it gets no picture.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final
from urllib.parse import unquote

from pydantic import BaseModel
from pydantic_core import PydanticCustomError

MOST_URL: Final = 8192  # characters of a URL
LOW_DETAIL_TOKENS: Final = 256  # the tokens of 512 x 512 pixels; OpenAI's low detail has this size

_MARK: Final = secrets.token_hex(16)  # begins every mark of this process
_MARKS: Final = re.compile(f"({_MARK}[0-9a-f]{{16}})")
# Some clients leave "data:" out, and some put the prefix before a string that has it.
_DATA_URL: Final = re.compile(
    r"(?:\s*(?:data:)?([\w.+*/-]+)?(?:;\s*[\w.+-]+=[^;,]*)*;\s*base64,){1,2}", re.ASCII | re.IGNORECASE
)
# The beginnings of PNG, JPEG, GIF and WebP files in base64, in both alphabets: clients send base64 in a URL's place.
_FILES: Final = ("iVBORw0KGgo", "/9j/", "_9j_", "R0lGOD", "UklGR")
_SPACE: Final = re.compile(r"\s+")
_URL_SAFE: Final = str.maketrans("-_", "+/")  # RFC 4648, section 5


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A picture's file as the client sent it, or the URL to fetch it from."""

    data: bytes  # empty with `url`
    max_tokens: int | None = None  # None: the server's limit
    mark: str = field(default_factory=lambda: _MARK + secrets.token_hex(8))
    url: str | None = None


@dataclass(frozen=True, slots=True)
class PicturedText:
    """A message's text with marks for its pictures."""

    text: str
    pictures: tuple[Picture, ...]


def pictures_in(value: Any) -> Iterator[Picture]:
    """Yields the pictures in a body or a list of bodies, in their order."""
    match value:
        case Picture():
            yield value
        case PicturedText():
            yield from value.pictures
        case list():
            for one in value:
                yield from pictures_in(one)
        case BaseModel():
            for one in value.__dict__.values():
                yield from pictures_in(one)


def joined(texts: Iterable[str]) -> str:
    """Joins the texts of a message's parts. Each text begins a new line; pictures do not."""
    parts = list(texts)
    lines = parts[:1]
    for before, text in pairwise(parts):
        is_text = not (_MARKS.fullmatch(before) or _MARKS.fullmatch(text))
        lines += ["\n" if is_text else "", text]
    return "".join(lines)


def split_at_marks(text: str) -> list[str]:
    """Splits a text at its marks. Returns texts and marks alternately; the first and the last element are texts, which
    may be empty."""
    return _MARKS.split(text)


def picture_of_base64(text: str, max_tokens: int | None = None) -> Picture:
    """Decodes a picture from base64 in either alphabet, with or without padding, percent-encoded or broken into lines.
    Accepts a data: URL too, which some clients send instead of bare base64. Raises PydanticCustomError."""
    if (found := _DATA_URL.match(text[:256])) is not None:
        text = text[found.end() :]
    if "%" in text:
        text = unquote(text, "ascii", "replace")
    text = _SPACE.sub("", text).translate(_URL_SAFE).rstrip("=")
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise PydanticCustomError("picture", "the picture is no base64") from error
    if not data:
        raise PydanticCustomError("picture", "the picture is empty")
    return Picture(data, max_tokens)


def picture_of_url(url: Any, max_tokens: int | None = None) -> Picture:
    """Accepts http(s) and data: URLs, and a file's base64 without a URL. Raises PydanticCustomError."""
    if not isinstance(url, str):
        raise PydanticCustomError("picture", "the picture's URL must be a string")
    if _DATA_URL.match(url[:256]) or url[:256].lstrip().startswith(_FILES):
        return picture_of_base64(url, max_tokens)
    if url[:256].lstrip()[:5].lower() == "data:":
        raise PydanticCustomError("picture", "the picture's URL is not data:image/...;base64,...")
    if len(url) > MOST_URL:
        raise PydanticCustomError("picture", "the picture's URL is too long")
    return Picture(b"", max_tokens, url=url)


def max_tokens_of(detail: Any) -> int | None:
    """Returns the token limit for OpenAI's `detail`. Raises PydanticCustomError."""
    if detail not in (None, "auto", "low", "high", "original"):
        raise PydanticCustomError("picture", "detail must be auto, low, high or original")
    return LOW_DETAIL_TOKENS if detail == "low" else None
