"""Explains llguidance's errors by the client's schemas: which tool, which place, and why."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Final

import numpy as np

from .engine import GrammarEngine
from .errors import GrammarError
from .json_schema.enforced import enforced
from .json_schema.keywords import subschemas
from .json_schema.references import Document, Place, pointer
from .spec import (
    Channels,
    GrammarSpec,
    JsonOrToolCalls,
    JsonSchema,
    Messages,
    Sections,
    WholeAnswer,
    WithCalls,
)

MAX_SECONDS: Final = 0.5  # CPU time of the search
MAX_PLACES: Final = 100  # depth of nesting

_IN_GRAMMAR: Final = re.compile(r"^at \d+\(\d+\): |failed to compile JSON schema: ")
_WHILE: Final = re.compile(r"\n\s*while processing .*")
_UNSATISFIABLE: Final = "Unsatisfiable schema"
_REQUIRED: Final = re.compile(r"required property '(.*)' is unsatisfiable", re.DOTALL)
_KEYWORDS: Final = re.compile(r"Unimplemented keys: \[(.*)\]")


def explained(engine: GrammarEngine, spec: GrammarSpec, error: GrammarError) -> str:
    """Returns the error of a spec that does not compile, worded for the client. Errors of a client's own grammar or
    pattern are returned unchanged."""
    schemas = list(_schemas(spec))
    for whose, schema in schemas:
        search = _Search(engine, schema)
        if search.message is not None:
            place = search.innermost()
            at = f"at {pointer(place.steps)}" if place.steps else ""
            where = " ".join(filter(None, (whose, at)))
            message = search.message_at(place)
            return f"{where}: {message}" if where else message
    return _plain(str(error)) if schemas else str(error)


def _schemas(spec: GrammarSpec) -> Iterator[tuple[str, str]]:
    """Yields the JSON Schemas of a spec, each with the name of its owner."""
    match spec:
        case JsonSchema(schema=schema) | JsonOrToolCalls(schema=schema):
            yield "", schema
        case (
            Channels(answer=JsonSchema(schema=schema))
            | Messages(answer=JsonSchema(schema=schema))
            | Sections(answer=JsonSchema(schema=schema))
        ):
            yield "", schema
    if isinstance(spec, WithCalls | WholeAnswer):
        yield from ((f'tool "{tool.name}"', tool.schema) for tool in spec.tools)


class _Search:
    """Searches the innermost schema that has the same error as the whole one."""

    def __init__(self, engine: GrammarEngine, schema: str) -> None:
        self._engine = engine
        self._schema = schema
        self._until = time.thread_time() + MAX_SECONDS
        self._root = Document(json.loads(schema)).root
        self._document = Document(self._root.schema)
        self._errors: dict[tuple[str, ...], str | None] = {}  # by the place
        self.message = self._error(self._root)  # None: the schema compiles

    def innermost(self) -> Place:
        return self._innermost(self._root, {()}) or self._root

    def message_at(self, place: Place) -> str:
        """Returns the error of the innermost schema that cannot be satisfied, because it says more than the error of
        the whole schema."""
        message = self._error(place) if place.steps else None
        return message or self.message or ""

    def _is_within(self, place: Place, inner: Place) -> bool:
        """Returns whether a schema has the same error as its subschema `inner`."""
        error, outer = self._error(inner), self._error(place)
        if error is None or outer is None or error == outer:
            return error is not None
        if not (outer.startswith(_UNSATISFIABLE) and error.startswith(_UNSATISFIABLE)):
            return False
        required = _REQUIRED.search(outer)
        return required is None or inner.steps[-2:] == ("properties", required[1])

    def _innermost(self, place: Place, seen: set[tuple[str, ...]]) -> Place | None:
        """Returns the innermost place with the error; None if that lies in a schema that was already searched."""
        has_it_within = False
        for inner in self._within(place):
            if time.thread_time() > self._until or len(seen) > MAX_PLACES:
                return place
            if not isinstance(inner.schema, dict) or not self._is_within(place, inner):
                continue
            has_it_within = True
            if inner.steps not in seen:
                found = self._innermost(inner, seen | {inner.steps})
                if found is not None:
                    return found
        return None if has_it_within else place

    def _within(self, place: Place) -> Iterator[Place]:
        yield from (place.child(one, *steps) for steps, one in subschemas(place.schema, definitions=False))
        if isinstance(place.schema, dict) and "$ref" in place.schema:
            target = self._document.follow(place.schema["$ref"], place.base)
            if target is not None:
                yield target

    def _error(self, place: Place) -> str | None:
        if place.steps not in self._errors:
            self._errors[place.steps] = self._compiled(place)
        return self._errors[place.steps]

    def _compiled(self, place: Place) -> str | None:
        """Compiles a subschema. Returns the error; None if the schema is valid."""
        try:
            grammar = f'{{"grammars": [{{"json_schema": {enforced(self._schema, place.steps)}}}]}}'
            self._engine.matcher(grammar).fill(np.zeros(self._engine.words, np.int32))
        except GrammarError as error:
            return _plain(str(error))
        return None


def _plain(message: str) -> str:
    """Returns llguidance's message without the position in our generated grammar."""
    text = _WHILE.sub("", _IN_GRAMMAR.sub("", message))
    if (keywords := _KEYWORDS.search(text)) is not None:
        return f"{', '.join(json.loads(f'[{keywords[1]}]'))} cannot be enforced"
    if text.startswith("regex parse error"):
        return f"pattern: {text.rpartition('error: ')[2]}"
    if text.startswith("Unable to determine if regex is empty"):
        return (
            "pattern, format and lengths of this string are too complex to be enforced together; simplify the pattern, "
            "or leave minLength and maxLength out"
        )
    if text.startswith(f"{_UNSATISFIABLE}: Regex is empty"):
        return f"{_UNSATISFIABLE}: no string fits pattern, format and lengths together; correct one of them"
    if text.startswith("circular references"):
        return "a $ref that leads back to itself cannot be combined with keywords beside it"
    return text.partition("\n")[0]
