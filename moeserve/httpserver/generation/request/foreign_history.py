"""Parts of a conversation's history that only the server where the conversation began understands: calls of tools that
ran there, approvals, markers of its client.

The model continues without them. They are dropped like unknown fields, and the answer's header names them, because new
versions of clients add kinds of parts, and a refused history ends the conversation.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, get_args

from pydantic import ValidationInfo
from pydantic.fields import FieldInfo

from moeserve.httpserver.transport.unknown_fields import drop_unknown


def types_of(union: Any) -> frozenset[str]:
    """Returns the values of `type` in a union of models, which may be annotated."""
    models = get_args(union)
    if not models:
        field: FieldInfo = union.model_fields["type"]
        return frozenset(get_args(field.annotation))
    return frozenset().union(*(types_of(model) for model in models if _has_type(model)))


def _has_type(model: Any) -> bool:
    return bool(get_args(model)) or "type" in getattr(model, "model_fields", {})


def without_unknown_types(parts: Any, known: Collection[str], place: str, info: ValidationInfo) -> Any:
    """Leaves out the parts of a list whose `type` is unknown. place: of the parts in a body, such as
    "input[].type="."""
    if not isinstance(parts, list):
        return parts
    kinds = {kind for part in parts if isinstance(kind := _kind_of(part), str) and kind not in known}
    if not kinds or not drop_unknown(info, place, sorted(kinds)):
        return parts
    return [part for part in parts if not isinstance(kind := _kind_of(part), str) or kind not in kinds]


def _kind_of(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else None
