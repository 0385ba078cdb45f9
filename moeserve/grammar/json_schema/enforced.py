"""Rewrites a client's schema as the one that llguidance gets.

- Objects that name their properties are closed unless they say otherwise: what validates against the result validates
  against the client's schema, and a model that has lost its way cannot invent keys for ever.
- White space and the digits of integers are bounded, for the same reason.
- Annotations are left out: llguidance takes unknown formats for errors, and unknown keywords for restrictions, which it
  cannot combine with a recursive `$ref`.
- `oneOf` is `anyOf` where no two alternatives can hold at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Any, Final

from ..errors import GrammarError
from .disjoint import Disjointness
from .integers import with_bounds
from .keywords import IN_PLACE
from .named import ANYTHING, NOTHING, Named, Schemas, tag, union
from .references import Document, Place

# White space between JSON tokens: one blank, or a line end with indentation. None before or after the text.
_WHITESPACE: Final = r" |\r?\n[ \t]{0,20}"
# A bounded integer takes 1 ms to compile, once per schema. Grammars with more schemas leave integers unbounded.
MAX_BOUNDED: Final = 32
_OBJECT: Final = ("properties", "patternProperties", "additionalProperties")
_LENIENT: Final = ("lenient", "coerce_one_of")  # llguidance's options that take oneOf for anyOf
_OF_ITEMS: Final = ("items", "prefixItems")
_NOT_IN_NAMES: Final = re.compile(r"[^\w.-]")


def enforced(schema: str, steps: tuple[str, ...] = (), *, bounds_integers: bool = True) -> str:
    """Takes and returns JSON text. steps: JSON pointer to a subschema; the result is then that of the subschema. Raises
    GrammarError."""
    root = json.loads(schema)
    if not isinstance(root, dict):
        return schema
    document, options = Document(root), root.get("x-guidance")
    made = _Enforced(document, options, bounds_integers).whole(document.root.inner(*steps))
    if isinstance(made, dict):
        made = made | {"x-guidance": _options(options)}
    return json.dumps(made)


def _options(own: Any) -> Any:
    """Returns llguidance's options: the client's, plus our bound on white space if the client sets none."""
    if own is None:
        return {"whitespace_pattern": _WHITESPACE}
    is_settled = not isinstance(own, dict) or "whitespace_flexible" in own
    return own if is_settled else {"whitespace_pattern": _WHITESPACE} | own


class _Enforced:
    """Rewrites one document. In all methods, others: names in the other schemas of the same value."""

    def __init__(self, document: Document, options: Any, bounds_integers: bool) -> None:
        self._document = document
        self._may_miss = isinstance(options, dict) and bool(options.get("lenient"))  # targets of `$ref`
        self._is_lenient = isinstance(options, dict) and any(options.get(one) for one in _LENIENT)
        self._bounds_integers = bounds_integers
        self._schemas = Schemas(document)
        self._disjoint = Disjointness(self._schemas)
        self._definitions: dict[str, Any] = {}
        self._names: dict[
            tuple[tuple[str, ...] | str, Named | None], str
        ] = {}  # names of definitions, by the schema's place or kind
        self._taken: set[str] = set()
        self._waiting: list[tuple[str, Place, Named]] = []

    def whole(self, place: Place) -> Any:
        made = self._schema(place, NOTHING)
        while self._waiting:
            name, target, others = self._waiting.pop()
            self._definitions[name] = self._schema(target, others)
        return made | {"$defs": self._definitions} if self._definitions else made

    def _schema(self, place: Place, others: Named) -> Any:
        if not isinstance(place.schema, dict):
            return place.schema
        keywords = self._schemas.keywords(place)
        if not keywords.keys().isdisjoint(IN_PLACE):
            return self._combined(place, others)
        integer = with_bounds(keywords) if self._bounds_integers else None
        if integer is not None:
            return {"$ref": self._defined("integer", json.dumps(integer), integer)}
        made: dict[str, Any] = {}
        for keyword in keywords:
            self._add(keyword, made, place, others)
        return self._with_tag(made, place, others)

    def _combined(self, place: Place, others: Named) -> dict[str, Any]:
        """Rewrites a schema with `allOf`, `anyOf` and the like. llguidance combines them in the order of the keywords,
        which therefore decides the order of properties."""
        parts = self._schemas.parts(place)
        named = {part: union(map(self._schemas.named, places)) for part, places in parts.items()}
        named[""] = self._schemas.own(place)

        def beside(part: str) -> Named:
            return union((others, *(one for name, one in named.items() if name != part)))

        made: dict[str, Any] = {}
        further: list[Any] = []
        for keyword, value in self._schemas.keywords(place).items():
            match keyword, value:
                case "allOf", list():
                    made["allOf"] = [
                        self._schema(parts[part][0], beside(part))
                        for part in (f"allOf/{i}" for i in range(len(value)))
                    ]
                case (("anyOf" | "oneOf"), list()):
                    around = beside(keyword) | tag(place)
                    if keyword == "oneOf":
                        options = self._one_of(parts[keyword], around)
                    else:
                        options = [self._schema(one, around) for one in parts[keyword]]
                    if keyword == "oneOf" and "anyOf" in place.schema:
                        further.append({"anyOf": options})
                    else:
                        made["anyOf"] = options
                case "unevaluatedProperties", False if not (
                    others.names or others.patterns or others.is_open
                ):
                    if not union(named.values()).is_closed:
                        made["additionalProperties"] = False
                case "$ref", _:
                    made |= self._reference(value, place, beside("$ref"))
                case _:
                    self._add(keyword, made, place, beside(""))
        if further:
            made["allOf"] = [*made.get("allOf", []), *further]
        return self._with_tag(made, place, others)

    def _one_of(self, alternatives: list[Place], others: Named) -> list[Any]:
        """Returns the alternatives of a `oneOf` for `anyOf`. Raises GrammarError if a value may match two of them,
        because a grammar cannot forbid that."""
        names = self._single_names(alternatives)
        if names is not None:
            return [
                {
                    "type": "object",
                    "properties": {one: False for one in names if one != name},
                    "required": [name],
                }
                for name in names
            ]
        overlap = None if self._is_lenient else self._disjoint.overlap(alternatives, others)
        if overlap is not None:
            raise GrammarError(
                f"oneOf: a value may match alternatives {overlap[0]} and {overlap[1]} at once; use anyOf, or give each "
                "a required property whose const differs"
            )
        return [self._schema(one, others) for one in alternatives]

    def _single_names(self, alternatives: list[Place]) -> list[str] | None:
        """If the alternatives only say that exactly one of several properties must be present, returns these
        properties; else None."""
        found: list[str] = []
        for place in alternatives:
            keywords = self._schemas.keywords(place) if isinstance(place.schema, dict) else {}
            match keywords:
                case {"required": [str(name)]} if (
                    keywords.keys() <= {"required", "type"} and name not in found
                ):
                    found.append(name)
                case _:
                    return None
            if keywords.get("type", "object") != "object":
                return None
        return found if len(found) > 1 else None

    def _with_tag(self, made: dict[str, Any], place: Place, others: Named) -> dict[str, Any]:
        """Adds the discriminator property to the required ones."""
        required = self._schemas.required(place, others) if others.required else []
        return made | {"required": required} if required else made

    def _add(self, keyword: str, made: dict[str, Any], place: Place, others: Named) -> None:
        """Adds a keyword of the schema itself to the result `made`."""
        if keyword not in _OBJECT:
            made[keyword] = self._value(keyword, place, others)
        elif keyword not in made:  # llguidance combines these three only if they are adjacent
            made.update(self._object(place, others))

    def _object(self, place: Place, others: Named) -> dict[str, Any]:
        """Returns the keywords of _OBJECT, with other properties forbidden."""
        keywords = self._schemas.keywords(place)
        made: dict[str, Any] = {
            keyword: self._value(keyword, place, others) for keyword in _OBJECT if keyword in keywords
        }
        if _is_to_close(keywords, others):
            own = self._schemas.own(place)
            properties, patterns = made.get("properties", {}), made.get("patternProperties", {})
            named = dict.fromkeys(sorted((own.names | others.names) - properties.keys()), True)
            made["properties"] = properties | named
            if patterns or others.patterns:
                made["patternProperties"] = dict.fromkeys(sorted(others.patterns), True) | patterns
            made["additionalProperties"] = False
            if keywords.keys().isdisjoint(("type", "const", "enum", *IN_PLACE)) and not others.is_typed:
                made["type"] = "object"
        return made

    def _value(self, keyword: str, place: Place, others: Named) -> Any:
        """Returns a keyword's value, with the schemas of nested values rewritten."""

        def inner(schema: Any, *steps: str, beside: Iterable[str]) -> Any:
            is_shared = others.is_open_within or not others.described.isdisjoint(beside)
            return self._schema(place.child(schema, keyword, *steps), ANYTHING if is_shared else NOTHING)

        value = self._schemas.keywords(place)[keyword]
        match keyword, value:
            case "properties", dict():
                return {
                    name: inner(one, name, beside=(f"/{name}", "additionalProperties"))
                    for name, one in value.items()
                }
            case "patternProperties", dict():
                return {name: inner(one, name, beside=others.described) for name, one in value.items()}
            case "additionalProperties", dict():
                return inner(value, beside=others.described)
            case (("items" | "additionalItems"), dict()):
                return inner(value, beside=_OF_ITEMS)
            case (("items" | "prefixItems"), list()):
                return [inner(one, str(i), beside=_OF_ITEMS) for i, one in enumerate(value)]
        return value

    def _reference(self, reference: Any, place: Place, others: Named) -> dict[str, Any]:
        target = self._document.follow(reference, place.base)
        if target is None and self._may_miss:
            return {}
        if target is None:
            raise GrammarError(f"$ref {reference!r} points to nothing in the schema")
        key = (target.steps, others)
        if key not in self._names:
            self._names[key] = self._new_name(target.steps[-1] if target.steps else "root")
            self._waiting.append((self._names[key], target, others))
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def _defined(self, wish: str, key: str, schema: Any) -> str:
        """Makes a definition of a schema that is used in many places, so that llguidance compiles it once. Returns a
        reference to it."""
        name = self._names.get((key, None))
        if name is None:
            name = self._names[key, None] = self._new_name(wish)
            self._definitions[name] = schema
        return f"#/$defs/{name}"

    def _new_name(self, wish: str) -> str:
        plain = _NOT_IN_NAMES.sub("_", wish)
        name = next(name for name in _numbered(plain) if name not in self._taken)
        self._taken.add(name)
        return name


def _is_to_close(keywords: Mapping[str, Any], others: Named) -> bool:
    """Returns whether other properties are to be forbidden: the schema lists properties, does not mention others, and
    lists enough for its own minProperties."""
    if others.is_open or "additionalProperties" in keywords or keywords.get("unevaluatedProperties", False):
        return False
    properties, patterns = keywords.get("properties", {}), keywords.get("patternProperties", {})
    if not isinstance(properties, dict) or not isinstance(patterns, dict):
        return False
    least = keywords.get("minProperties", 0)
    return bool(patterns) or not isinstance(least, int) or least <= len(properties.keys() | others.names)


def _numbered(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}_{i}" for i in count(2))
