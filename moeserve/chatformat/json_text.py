"""JSON texts that UTF-8 can hold."""

from __future__ import annotations

import json
from typing import Any


def to_json(value: Any) -> str:
    """Compact enough, and valid Unicode: `json.loads` may have made lone surrogates. ValueError for a number that
    JSON cannot hold."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_unicode(text) else json.dumps(value, allow_nan=False)


def escaped(text: str) -> str:
    """The inside of the text's JSON string."""
    return to_json(text)[1:-1]


def is_unicode(text: str) -> bool:
    """False when it holds a lone surrogate, which no UTF-8 can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
