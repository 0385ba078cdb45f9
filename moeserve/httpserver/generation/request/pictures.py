"""Pictures in conversations.

Chat templates take texts, so in the text for a template a picture is a mark that cannot be guessed. In the rendered
text, the mark is replaced by the model's own placeholders and the picture's embeddings. Placeholders that a client
spells out are not marks, and get no picture."""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from pydantic import BaseModel
from pydantic_core import PydanticCustomError

MOST_PICTURES: Final = 64  # of a request
LOW_DETAIL_TOKENS: Final = 256  # of 512 x 512 pixels, as OpenAI has it

_MARK: Final = secrets.token_hex(16)  # begins every mark of this process
_MARKS: Final = re.compile(f"({_MARK}[0-9a-f]{{16}})")
_DATA_URL: Final = re.compile(
    r"data:([\w.+-]+/[\w.+-]+)?(?:;[\w.+-]+=[^;,]*)*;base64,", re.ASCII | re.IGNORECASE
)
_SPACE: Final = re.compile(r"\s+")


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A file, as the client has sent it."""

    data: bytes
    max_tokens: int | None = None  # None: the server's limit
    mark: str = field(default_factory=lambda: _MARK + secrets.token_hex(8))


@dataclass(frozen=True, slots=True)
class PicturedText:
    """A message's text with marks in the places of pictures."""

    text: str
    pictures: tuple[Picture, ...]


def pictures_in(value: Any) -> Iterator[Picture]:
    """Yields the pictures in a request's model or in a list of them, in their order."""
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
    """The text of a message's parts: texts are lines of their own, and pictures stand in the text."""
    parts = list(texts)
    lines = parts[:1]
    for before, text in pairwise(parts):
        is_text = not (_MARKS.fullmatch(before) or _MARKS.fullmatch(text))
        lines += ["\n" if is_text else "", text]
    return "".join(lines)


def split_at_marks(text: str) -> list[str]:
    """Returns texts and marks in turn. The first and the last are texts, which may be empty."""
    return _MARKS.split(text)


def picture_of_base64(text: str, max_tokens: int | None = None) -> Picture:
    """Reads base64, or a data: URL, which some clients send in its place. Raises PydanticCustomError."""
    if (found := _DATA_URL.match(text[:256])) is not None:
        text = text[found.end() :]
    text = _SPACE.sub("", text)
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise PydanticCustomError("picture", "the picture is no base64") from error
    if not data:
        raise PydanticCustomError("picture", "the picture is empty")
    return Picture(data, max_tokens)


def picture_of_url(url: Any, max_tokens: int | None = None) -> Picture:
    """Raises PydanticCustomError."""
    if not isinstance(url, str):
        raise PydanticCustomError("picture", "the picture's URL must be a string")
    if _DATA_URL.match(url[:256]):
        return picture_of_base64(url, max_tokens)
    if url[:5].lower() == "data:":
        raise PydanticCustomError("picture", "the picture's URL is not data:image/...;base64,...")
    raise PydanticCustomError(
        "picture",
        "pictures are not fetched from addresses: send the picture itself, as data:image/png;base64,...",
    )


def max_tokens_of(detail: Any) -> int | None:
    """The limit that OpenAI's `detail` means. Raises PydanticCustomError."""
    if detail not in (None, "auto", "low", "high", "original"):
        raise PydanticCustomError("picture", "detail must be auto, low, high or original")
    return LOW_DETAIL_TOKENS if detail == "low" else None
