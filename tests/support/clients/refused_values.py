"""Values that a field of a request must refuse, by the field's type."""

from __future__ import annotations

from typing import Any

HUGE = 10**30
INT64 = 1 << 63
NOT_NUMBERS: list[Any] = ["1", True, [], {}]
NOT_WHOLE: list[Any] = [*NOT_NUMBERS, 1.5, HUGE, -HUGE]
NOT_INTEGERS: list[Any] = [*NOT_WHOLE, 1.0]
NOT_BOOLEANS: list[Any] = ["true", 1, 0, [], {}]
NOT_STRINGS: list[Any] = [5, True, [], {}]

BAD_SCHEMAS: list[dict[str, Any]] = [
    {"type": "x"},
    {"$ref": "file:///etc/passwd"},
    {"type": "integer", "minimum": 5, "maximum": 4},
]
UNENFORCED: dict[str, Any] = {"type": "array", "uniqueItems": True}  # refused if the answer must be strict
