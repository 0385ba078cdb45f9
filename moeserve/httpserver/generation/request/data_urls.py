"""Files in JSON: as data: URLs (RFC 2397) or in base64, in the forms that clients send."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Final
from urllib.parse import unquote

from pydantic_core import PydanticCustomError

# Some clients leave "data:" out, and some put the prefix before a string that has it.
_DATA_URL: Final = re.compile(
    r"(?:\s*(?:data:)?([\w.+*/-]+)?(?:;\s*[\w.+-]+=[^;,]*)*;\s*base64,){1,2}", re.ASCII | re.IGNORECASE
)
_SPACE: Final = re.compile(r"\s+")
_URL_SAFE: Final = str.maketrans("-_", "+/")  # RFC 4648, section 5


def base64_bytes(text: str, what: str, *, may_be_empty: bool = False) -> bytes:
    """Returns the bytes of a text in base64, in either alphabet, with or without padding, percent-encoded or broken
    into lines. Accepts a data: URL too, which some clients send instead of bare base64. what: such as "picture", for
    messages. Raises PydanticCustomError for invalid base64, and for no bytes unless may_be_empty."""
    if (found := _DATA_URL.match(text[:256])) is not None:
        text = text[found.end() :]
    if "%" in text:
        text = unquote(text, "ascii", "replace")
    text = _SPACE.sub("", text).translate(_URL_SAFE).rstrip("=")
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise PydanticCustomError(
            "base64", "the {what} is not valid base64; encode its bytes again", {"what": what}
        ) from error
    if not data and not may_be_empty:
        raise PydanticCustomError("base64", "the {what} is empty; send its bytes", {"what": what})
    return data


def data_type(url: str) -> str | None:
    """Returns the media type of a data: URL, or "" if it names none; None for another URL."""
    found = _DATA_URL.match(url[:256])
    return None if found is None else (found[1] or "").lower()
