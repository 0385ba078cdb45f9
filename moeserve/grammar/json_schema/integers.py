"""Bounds for integers that have none: their digits may go on for ever, and some models write them."""

from __future__ import annotations

from typing import Any, Final

_LARGEST: Final = 10**18  # 64 bits hold it
_LEAST: Final = ("minimum", "exclusiveMinimum")
_MOST: Final = ("maximum", "exclusiveMaximum")


def with_bounds(keywords: dict[str, Any]) -> dict[str, Any] | None:
    """Returns a schema's keywords with the bounds that it lacks; None where it needs none, and where its own lie
    beyond ours."""
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
