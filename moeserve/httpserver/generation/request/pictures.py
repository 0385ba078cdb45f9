"""Pictures in conversations.

Chat templates take texts, so a random mark stands for each picture in a message's text. In the rendered text each mark
is replaced by the model's placeholder tokens and the picture's embeddings. A placeholder that a client spells out is
not a mark, so it gets no picture.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from pydantic_core import PydanticCustomError

from moeserve.httpserver.generation.request.data_urls import base64_bytes, data_type
from moeserve.httpserver.generation.request.documents import PdfFile
from moeserve.messages.pictures import PixelBounds, VideoSettings

MOST_URL: Final = 8192  # characters of a URL
LOW_DETAIL_TOKENS: Final = 256  # the tokens of 512 x 512 pixels; OpenAI's low detail has this size

MEDIA_MARKER: Final = "<__media__>"  # stands for a picture in llama-server's plain prompts
PIXEL_FIELDS: Final = ("min_pixels", "max_pixels")  # beside a picture in Qwen's messages

_MARK: Final = secrets.token_hex(16)  # begins every mark of this process
_VIDEO_MARK: Final = f"{_MARK}v"
_MARKS: Final = re.compile(f"({_MARK}[pv][0-9a-f]{{16}})")
# The beginnings of PNG, JPEG, GIF and WebP files in base64, in both alphabets: clients send base64 in a URL's place.
_FILES: Final = ("iVBORw0KGgo", "/9j/", "_9j_", "R0lGOD", "UklGR")
_TYPES: Final = {"picture": "image", "video": "video"}  # the first word of media types


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A picture's or a video's file as the client sent it, or the URL to fetch it from, or a video's frames."""

    data: bytes  # empty with `url` or `frames`
    max_tokens: int | None = None  # None: the server's limit
    mark: str = field(init=False)
    url: str | None = None
    video: VideoSettings | None = None  # None: it is a picture
    frames: tuple[Picture, ...] = ()  # of a video
    pixels: PixelBounds | None = None

    def __post_init__(self) -> None:
        begin = f"{_MARK}p" if self.video is None else _VIDEO_MARK
        object.__setattr__(self, "mark", begin + secrets.token_hex(8))

    @property
    def what(self) -> str:
        """The name of the file in error messages: "picture" or "video"."""
        return "picture" if self.video is None else "video"


@dataclass(frozen=True, slots=True)
class PicturedText:
    """A message's text with marks for its pictures and PDFs."""

    text: str
    pictures: tuple[Picture, ...] = ()
    pdfs: tuple[PdfFile, ...] = ()


def at_markers(text: str, pictures: Sequence[Picture]) -> PicturedText:
    """Returns the text with the pictures in the places of MEDIA_MARKER. Raises PydanticCustomError unless there are as
    many markers as pictures."""
    first, *rest = text.split(MEDIA_MARKER)
    if len(rest) != len(pictures):
        raise PydanticCustomError(
            "picture",
            "prompt_string has {markers} markers {marker}, and multimodal_data {pictures} pictures; send as many",
            {"markers": len(rest), "marker": MEDIA_MARKER, "pictures": len(pictures)},
        )
    marked = (part for picture, behind in zip(pictures, rest, strict=True) for part in (picture.mark, behind))
    return PicturedText("".join((first, *marked)), tuple(pictures))


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


def is_video(mark: str) -> bool:
    return mark.startswith(_VIDEO_MARK)


def picture_of_base64(text: str, max_tokens: int | None = None, pixels: PixelBounds | None = None) -> Picture:
    """Decodes a picture's base64; see `base64_bytes` for the accepted forms. Raises PydanticCustomError for a text that
    is no base64 or too long."""
    return Picture(base64_bytes(text, "picture"), max_tokens, pixels=pixels)


def checked_url(url: str, what: str) -> str:
    """Returns the URL unchanged. Raises PydanticCustomError for a malformed data: URL or a URL that is too long."""
    if url[:256].lstrip()[:5].lower() == "data:":
        raise PydanticCustomError(
            "picture",
            "the {what}'s URL is not data:{type}/...;base64,...; write it in this form",
            {"what": what, "type": _TYPES[what]},
        )
    if len(url) > MOST_URL:
        raise PydanticCustomError(
            "picture", "the {what}'s URL is too long; send a smaller file", {"what": what}
        )
    return url


def picture_of_url(url: Any, max_tokens: int | None = None, pixels: PixelBounds | None = None) -> Picture:
    """Returns the picture of an http(s) URL, of a data: URL, or of bare base64. Raises PydanticCustomError for a URL of
    another form or that is too long."""
    if not isinstance(url, str):
        raise PydanticCustomError("picture", "the picture's URL must be a string")
    if data_type(url) is not None or url[:256].lstrip().startswith(_FILES):
        return picture_of_base64(url, max_tokens, pixels)
    return Picture(b"", max_tokens, url=checked_url(url, "picture"), pixels=pixels)


def pixel_bounds(*objects: dict[str, Any]) -> PixelBounds | None:
    """Returns the bounds in the first of a part's objects that has some; None without any. Raises
    PydanticCustomError."""
    for one in objects:
        given = [one.get(name) for name in PIXEL_FIELDS]
        if given == [None, None]:
            continue
        if any(each is not None and (type(each) is not int or each < 1) for each in given):
            raise PydanticCustomError("picture", "min_pixels and max_pixels must be whole numbers above 0")
        least, most = given
        if least is not None and most is not None and least > most:
            raise PydanticCustomError("picture", "min_pixels must not exceed max_pixels")
        return PixelBounds(least, most)
    return None


def max_tokens_of(detail: Any) -> int | None:
    """Returns the token limit for OpenAI's `detail`, in any case, as C#'s libraries write it. Raises
    PydanticCustomError."""
    if isinstance(detail, str):
        detail = detail.lower() or None
    if detail not in (None, "auto", "low", "high", "original"):
        raise PydanticCustomError("picture", "detail must be auto, low, high or original")
    return LOW_DETAIL_TOKENS if detail == "low" else None
