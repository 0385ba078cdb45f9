"""Repairs a call's arguments that are not a JSON object: clients send back calls that were cut off."""

from __future__ import annotations

import json
from typing import Any, Final

from moeserve.chatformat.json_reader import JsonReader, Status
from moeserve.httpserver.transport.lone_surrogates import without_lone_surrogates
from moeserve.httpserver.transport.request_model import MAX_VALUES

_KEY: Final = "arguments"  # the name given to a text that has no keys


def as_object(text: str) -> dict[str, Any]:
    """Returns a call's arguments as an object, without an incomplete value at the text's end. If no argument can be
    read, the whole text becomes one argument."""
    if text.count("[") + text.count("{") > MAX_VALUES:
        return {_KEY: text}
    try:
        value = json.loads(without_lone_surrogates(_completed(text) or text))
    except (ValueError, RecursionError):
        return {_KEY: text} if text.strip() else {}
    return of_any_type(value)


def of_any_type(value: Any) -> dict[str, Any]:
    """Returns a call's arguments as an object: an object unchanged, null as no arguments, any other value as one
    argument."""
    if isinstance(value, dict):
        return value
    return {} if value is None else {_KEY: value}


def _completed(text: str) -> str | None:
    """Completes a JSON object that was cut off or is written loosely; None if the text is not an object."""
    reader = JsonReader()
    shown = []
    for at, char in enumerate(text, 1):
        status = reader.push(char)
        shown.append(reader.shown)
        if status is Status.DONE:
            return None if text[at:].strip() else "".join(shown)
        if status is Status.BROKEN:
            return None
    rest = reader.cut_off()
    return None if rest is None else "".join(shown) + rest
