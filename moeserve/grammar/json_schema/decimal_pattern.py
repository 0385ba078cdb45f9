"""pydantic's pattern of a Decimal that is written as a string. Its look-ahead, which asks for a digit, is refused by
llguidance."""

from __future__ import annotations

import re
from typing import Any, Final

# pydantic 2.12, json_schema.py, get_decimal_pattern: without max_digits; with decimal_places the number is the group.
_PYDANTIC: Final = re.compile(
    re.escape(r"^(?!^[-+.]*$)[+-]?0*\d*\.?") + r"(?:\\d\*|\\d\{0,(\d{1,3})\}0\*)\$", re.ASCII
)


def without_look_ahead(pattern: Any) -> Any:
    """Returns a pattern that matches the same strings of ASCII digits. Other patterns and values that are no pattern
    are returned unchanged."""
    if not isinstance(pattern, str) or not (match := _PYDANTIC.fullmatch(pattern)):
        return pattern
    if match[1] is None:
        return r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)$"
    places = int(match[1])
    behind = f"[0-9]{{1,{places}}}0*" if places else "0+"
    return rf"^[+-]?([0-9]+(\.({behind})?)?|\.{behind})$"
