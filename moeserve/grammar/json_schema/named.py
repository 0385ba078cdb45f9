"""The property names that the schemas of one value describe.

A schema with `properties` is closed: no other name may come. Where several schemas describe one value (`allOf`, `$ref`
beside other keywords, ...), each must leave room for the names of the others. Where two of these are alternatives
(`anyOf` twice), both leave room for names of alternatives that are not chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .references import Document, Place
from .simplify import simplified


@dataclass(frozen=True, slots=True)
class Named:
    """The property names of one value, as some of its schemas state them."""

    names: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()  # regular expressions of names
    required: frozenset[str] = frozenset()  # names that must be required wherever they are properties
    described: frozenset[str] = frozenset()  # keywords, and "/" + property names, that have a subschema
    is_typed: bool = False  # some schema states the value's type
    is_closed: bool = False  # some schema lists the allowed names
    is_open: bool = False  # some schema allows names that are not listed
    is_open_within: bool = False  # nested objects stay open as well

    def __or__(self, other: Named) -> Named:
        if other is NOTHING:
            return self
        return Named(
            self.names | other.names,
            self.patterns | other.patterns,
            self.required | other.required,
            self.described | other.described,
            self.is_typed or other.is_typed,
            self.is_closed or other.is_closed,
            self.is_open or other.is_open,
            self.is_open_within or other.is_open_within,
        )


NOTHING = Named()
ANYTHING = Named(is_typed=True, is_open=True, is_open_within=True)


def union(several: Iterable[Named]) -> Named:
    found = NOTHING
    for one in several:
        found |= one
    return found


class Schemas:
    """A document's schemas, simplified, and the property names that they mention."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self._keywords: dict[int, dict[str, Any]] = {}  # by the id of the schema, which the document keeps
        self._named: dict[int, Named] = {}

    def keywords(self, place: Place) -> dict[str, Any]:
        """Returns the simplified keywords of a schema that is an object."""
        found = self._keywords.get(id(place.schema))
        if found is None:
            found = self._keywords[id(place.schema)] = simplified(place, self.document)
        return found

    def named(self, place: Place) -> Named:
        """Returns the names in the schema and in its subschemas that describe the same value."""
        found = self._named.get(id(place.schema))
        if found is None:
            found = self._named[id(place.schema)] = union(map(self.own, self._in_place(place)))
        return found

    def own(self, place: Place) -> Named:
        """Returns the names in the schema's own keywords."""
        if not isinstance(place.schema, dict):
            return NOTHING
        keywords = self.keywords(place)
        properties, patterns = (_dict(keywords.get(one)) for one in ("properties", "patternProperties"))
        others = [one for one in ("items", "prefixItems", "additionalProperties") if one in keywords]
        described = [
            *(f"/{name}" for name, schema in properties.items() if not isinstance(schema, bool)),
            *(one for one in others if not isinstance(keywords[one], bool)),
        ]
        return Named(
            names=frozenset([*properties, *self.required(place, NOTHING)]),
            patterns=frozenset(patterns),
            described=frozenset(described),
            is_typed=not keywords.keys().isdisjoint(("type", "const", "enum")),
            is_closed=bool(keywords.keys() & {"properties", "patternProperties"})
            or keywords.get("additionalProperties") is False,
            is_open=any(
                keywords.get(one, False) is not False
                for one in ("additionalProperties", "unevaluatedProperties")
            ),
        )

    def required(self, place: Place, others: Named) -> list[str]:
        """Returns the names of the required properties, with those from `others.required` last."""
        keywords = self.keywords(place)
        own = [one for one in _list(keywords.get("required")) if isinstance(one, str)]
        tags = others.required & _dict(keywords.get("properties")).keys()
        return own + sorted(tags.difference(own))

    def parts(self, place: Place) -> dict[str, list[Place]]:
        """Returns the subschemas that describe the same value, by keyword: each schema of `allOf` separately, all
        alternatives of an `anyOf` or `oneOf` together."""
        keywords = self.keywords(place)
        found: dict[str, list[Place]] = {}
        for word in ("allOf", "anyOf", "oneOf"):
            inner = [place.child(one, word, str(i)) for i, one in enumerate(_list(keywords.get(word)))]
            found |= (
                {f"{word}/{i}": [one] for i, one in enumerate(inner)} if word == "allOf" else {word: inner}
            )
        if "$ref" in keywords:
            target = self.document.follow(keywords["$ref"], place.base)
            found["$ref"] = [] if target is None else [target]
        return found

    def _in_place(self, place: Place) -> Iterator[Place]:
        waiting, seen = [place], {id(place.schema)}
        while waiting:
            one = waiting.pop()
            yield one
            if not isinstance(one.schema, dict):
                continue
            for inner in (inner for part in self.parts(one).values() for inner in part):
                if id(inner.schema) not in seen:
                    seen.add(id(inner.schema))
                    waiting.append(inner)


def tag(place: Place) -> Named:
    """Returns the property of OpenAPI's `discriminator` (which pydantic writes) as a required name: pydantic's schemas
    do not require it if it has a default."""
    discriminator = place.schema.get("discriminator")
    name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    return Named(required=frozenset([name])) if isinstance(name, str) else NOTHING


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
