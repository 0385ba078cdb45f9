"""Parts of a grammar in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from .spec import Piece

# Between the parts of a JSON text: enough to indent, not enough for a model that has lost its way to fill its
# answer with blanks. None before or after the text.
_WHITESPACE: Final = r"[ \t\r\n]{1,40}"


def bounded_schema(text: str) -> Any:
    """Adds our bound on white space, unless the schema sets its own in llguidance's `x-guidance`."""
    schema = json.loads(text)
    if not isinstance(schema, dict):
        return schema
    own = schema.get("x-guidance")
    return schema | {
        "x-guidance": {"whitespace_pattern": _WHITESPACE} | (own if isinstance(own, dict) else {})
    }


def pieces(sequence: Sequence[Piece]) -> str:
    """Returns a sequence of Lark's; neighbouring texts are one, which takes the tokens that the model has learnt."""
    parts: list[str] = []
    text = ""
    for piece in sequence:
        if isinstance(piece, str):
            text += piece
            continue
        parts += [literal(text)] * bool(text) + [f"<[{piece}]>"]
        text = ""
    return " ".join(parts + [literal(text)] * bool(text))


def literal(text: str) -> str:
    """Quotes a string for Lark, whose strings are written as JSON's."""
    return json.dumps(text)
