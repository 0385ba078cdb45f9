"""Parts of a grammar in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Sequence

from .spec import Piece


def pieces(sequence: Sequence[Piece]) -> str:
    """Returns a Lark sequence. Adjacent texts are joined into one literal, which is tokenized as the model has
    learnt."""
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
    """Quotes a string for Lark, in JSON's notation."""
    return json.dumps(text)
