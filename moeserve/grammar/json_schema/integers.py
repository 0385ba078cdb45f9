"""Bounds for integers without any: some models would write digits for ever."""

from __future__ import annotations

from typing import Any, Final

_LARGEST: Final = 10**18  # 64 bits hold it
_LEAST: Final = ("minimum", "exclusiveMinimum")
_MOST: Final = ("maximum", "exclusiveMaximum")


def with_bounds(keywords: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the schema's keywords with the missing bounds added; None if none is missing, or if the schema's own
    bounds exceed ours."""
    types = keywords.get("type")
    names = types if isinstance(types, list) else [types]
    if "integer" not in names or "number" in names or not keywords.keys().isdisjoint(("const", "enum")):
        return None
    least, most = ([keywords[one] for one in bounds if one in keywords] for bounds in (_LEAST, _MOST))
    if (least and most) or not all(
        isinstance(one, int | float) and abs(one) < _LARGEST for one in least + most
    ):
        return None
    return keywords | ({} if least else {"minimum": -_LARGEST}) | ({} if most else {"maximum": _LARGEST})
