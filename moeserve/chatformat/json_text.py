"""JSON texts without lone surrogates, which UTF-8 cannot encode."""

from __future__ import annotations

import json
from typing import Any


def to_json(value: Any) -> str:
    """Returns the value as JSON in valid Unicode, without the lone surrogates that `json.loads` may have made. Raises
    ValueError for a number that JSON cannot express."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_unicode(text) else json.dumps(value, allow_nan=False)


def escaped(text: str) -> str:
    """Returns the text as a JSON string without its quotes."""
    return to_json(text)[1:-1]


def is_unicode(text: str) -> bool:
    """Returns False for a text with a lone surrogate, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
