"""Finds out whether alternatives of `oneOf` exclude one another; if so, `anyOf` means the same.

Two schemas exclude each other by type, by `const` or `enum`, by a property that both have and one requires, and where
each requires a property that the other, being closed, does not have.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any, Final, NamedTuple

from .keywords import IN_PLACE
from .named import ANYTHING, NOTHING, Named, Schemas, union
from .references import Place

_TYPES: Final = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_MAX_DEPTH: Final = 40  # of properties and references


class _Side(NamedTuple):
    place: Place
    others: Named  # names in the other schemas of the same value

    @property
    def key(self) -> tuple[int, Named]:
        return id(self.place.schema), self.others


class Disjointness:
    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
        self._known: dict[tuple[tuple[int, Named], tuple[int, Named]], bool] = {}

    def overlap(self, alternatives: list[Place], others: Named) -> tuple[int, int] | None:
        """Returns the indices of two alternatives that are not known to exclude each other; None if all exclude one
        another. others: names in the other schemas of the same value."""
        for i, j in combinations(range(len(alternatives)), 2):
            if not self._exclude(_Side(alternatives[i], others), _Side(alternatives[j], others), 0):
                return i, j
        return None

    def _exclude(self, a: _Side, b: _Side, depth: int) -> bool:
        schemas = a.place.schema, b.place.schema
        if False in schemas:
            return True
        if not all(isinstance(schema, dict) for schema in schemas) or depth > _MAX_DEPTH:
            return False
        key = (a.key, b.key)
        if key not in self._known:
            self._known[key] = False  # answer during the recursion, for schemas that refer to themselves
            self._known[key] = self._differ(a, b, depth) or any(
                all(self._exclude(inner, other, depth + 1) for inner in part)
                for one, other in ((a, b), (b, a))
                for part in self._parts(one)
            )
        return self._known[key]

    def _parts(self, side: _Side) -> list[list[_Side]]:
        """Returns the subschemas that describe the same value, alternatives of one keyword together."""
        parts = {part: places for part, places in self._schemas.parts(side.place).items() if places}
        named = {part: union(map(self._schemas.named, places)) for part, places in parts.items()}
        named[""] = self._schemas.own(side.place)
        return [
            [
                _Side(place, union((side.others, *(one for name, one in named.items() if name != part))))
                for place in places
            ]
            for part, places in parts.items()
        ]

    def _differ(self, a: _Side, b: _Side, depth: int) -> bool:
        """Returns whether no value satisfies both schemas' own keywords. Their alternatives are ignored."""
        first, second = (self._schemas.keywords(side.place) for side in (a, b))
        listed, also = _listed(first), _listed(second)
        if listed is not None and also is not None:
            return not any(value == other for value in listed for other in also)
        common = _types(first, a.others) & _types(second, b.others)
        if common != {"object"}:
            return not common
        needed, also_needed = (set(self._schemas.required(*side)) for side in (a, b))
        if any(
            self._exclude(self._property(a, name), self._property(b, name), depth + 1)
            for name in sorted(needed | also_needed)
        ):
            return True
        return self._lacks(a, also_needed) and self._lacks(b, needed)

    def _property(self, side: _Side, name: str) -> _Side:
        properties = self._schemas.keywords(side.place).get("properties")
        is_shared = side.others.is_open_within or f"/{name}" in side.others.described
        schema = properties.get(name, True) if isinstance(properties, dict) else True
        return _Side(side.place.child(schema), ANYTHING if is_shared else NOTHING)

    def _lacks(self, side: _Side, names: set[str]) -> bool:
        """Returns whether no matching object can have all of these properties."""
        whole = self._schemas.named(side.place) | side.others
        return whole.is_closed and not whole.is_open and not whole.patterns and not names <= whole.names


def _listed(keywords: dict[str, Any]) -> list[Any] | None:
    if "const" in keywords:
        return [keywords["const"]]
    listed = keywords.get("enum")
    return listed if isinstance(listed, list) else None


def _types(keywords: dict[str, Any], others: Named) -> frozenset[str]:
    listed = _listed(keywords)
    if listed is not None:
        return frozenset(map(_type, listed))
    named = keywords.get("type")
    if named is None:
        is_object = "properties" in keywords and keywords.keys().isdisjoint(IN_PLACE) and not others.is_typed
        return frozenset({"object"}) if is_object else _TYPES
    types = {one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str)}
    return frozenset(types | ({"integer"} if "number" in types else set()))


def _type(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "integer" if float(value).is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"
