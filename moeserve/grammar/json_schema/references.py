"""The targets of `$ref`: JSON pointers, `$id` and `$anchor`, within one document."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

from .keywords import subschemas


class Place(NamedTuple):
    """A schema within a document."""

    schema: Any
    base: str  # the URI that its references are relative to
    steps: tuple[str, ...]  # JSON pointer from the document's root

    def inner(self, *steps: str) -> Place:
        """Returns the schema at these steps from here. All of them must exist."""
        found, base = self.schema, self.base
        for step in steps:
            found = found[int(step)] if isinstance(found, list) else found[step]
            base = _base_of(found, base)
        return Place(found, base, self.steps + steps)

    def child(self, schema: Any, *steps: str) -> Place:
        """Returns the place of `schema` at these steps from here. It may replace the document's own schema there."""
        return Place(schema, _base_of(schema, self.base), self.steps + steps)


class Document:
    """A schema and the targets of its references."""

    def __init__(self, root: Any) -> None:
        self.root = Place(root, _base_of(root, ""), ())

    def follow(self, reference: Any, base: str) -> Place | None:
        """Returns the target of a `$ref` in a schema with this base URI; None if it is not in the document."""
        target = _joined(base, reference) if isinstance(reference, str) else None
        if target is None:
            return None
        uri, fragment = urldefrag(target)
        if fragment and not fragment.startswith("/"):
            return self._named.get(target)
        resource = self.root if uri in ("", self.root.base) else self._named.get(uri)
        return None if resource is None else _behind(resource, unquote(fragment))

    @cached_property
    def _named(self) -> dict[str, Place]:
        """Returns the schemas with an `$id` or an `$anchor`, by their URIs."""
        found: dict[str, Place] = {}
        waiting = [self.root]
        while waiting:
            place = waiting.pop()
            if isinstance(place.schema, dict):
                if isinstance(place.schema.get("$id"), str):
                    found.setdefault(place.base, place)
                if isinstance(anchor := place.schema.get("$anchor"), str):
                    found.setdefault(f"{place.base}#{anchor}", place)
            waiting += [place.child(one, *steps) for steps, one in subschemas(place.schema, definitions=True)]
        return found


def pointer(steps: tuple[str, ...]) -> str:
    return "#" + "".join("/" + step.replace("~", "~0").replace("/", "~1") for step in steps)


def _behind(resource: Place, pointer: str) -> Place | None:
    steps = [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]
    try:
        return resource.inner(*steps)
    except (KeyError, IndexError, ValueError, TypeError):  # no such step, or nothing to step into
        return None


def _base_of(schema: Any, around: str) -> str:
    """Returns a schema's base URI. around: the enclosing schema's base URI."""
    if not isinstance(schema, dict) or not isinstance(own := schema.get("$id"), str):
        return around
    joined = _joined(around, own)
    return around if joined is None else urldefrag(joined).url


def _joined(base: str, reference: str) -> str | None:
    if reference.startswith("#"):
        return base + reference
    try:
        return urljoin(base, reference)
    except ValueError:  # not a URI, for example "http://["
        return None
