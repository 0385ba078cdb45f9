"""Turns pydantic's errors in a body into the 400 that the client gets."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Final

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from moeserve.httpserver.transport.errors import ApiError, shown
from moeserve.httpserver.transport.request_model import RequestModel
from moeserve.messages.refusal import Refusal

MAX_EXPLAINED: Final = 6  # further fields with an explanation; the rest are only named
MAX_PARAM_CHARS: Final = 200
_UNSUPPORTED: Final = {"unsupported_parameter": Refusal.UNSUPPORTED}  # by error code; others: invalid


def from_validation(model: type[RequestModel], errors: list[ErrorDetails]) -> ApiError:
    """Returns a 400 that explains the first error in full, and the errors of the other fields briefly."""
    explained: dict[
        str, tuple[str, str]
    ] = {}  # by param: (code, message); a union yields several errors for one field
    for error in errors:
        explained.setdefault(_param_of(model, error), _explain(model, error))
    (param, (code, message)), *others = (
        (param, error) for param, error in explained.items() if not _is_within(param, explained)
    )
    parts = [f"{param}: {message}" if param else message]
    for place, (other, (_, text)) in enumerate(others):
        parts.append(f"{other}: {text}" if place < MAX_EXPLAINED and other else other or text)
    there = [model.unsupported_fields[name] for name in explained if name in model.unsupported_fields]
    details = next((field.details for field in there if field.details is not None), None)
    refusal = _UNSUPPORTED.get(code)
    return ApiError(400, "; ".join(parts), param=param or None, code=code, details=details, refusal=refusal)


def _is_within(param: str, params: Collection[str]) -> bool:
    """Returns whether `param` lies inside one of the fields `params`. Such an error comes from an alternative of a
    union that did not match."""
    outer, dot, _ = param.rpartition(".")
    return bool(dot) and (outer in params or _is_within(outer, params))


def _param_of(model: type[RequestModel], error: ErrorDetails) -> str:
    names = [str(part) for part in error["loc"] if part != "[key]"]
    # The parts from a "[" on are types, not fields.
    fields = itertools.takewhile(lambda name: "[" not in name, names[1:])
    param = ".".join([*names[:1], *fields])
    if not param and error["type"] in model.model_fields:
        param = error[
            "type"
        ]  # fields that contradict each other: the error's type is the name of the field at fault
    return param[:MAX_PARAM_CHARS]


def _explain(model: type[RequestModel], error: ErrorDetails) -> tuple[str, str]:
    """Returns the error's code and its message."""
    given = "" if isinstance(error["input"], dict) else f", got {shown(error['input'])}"
    match error["type"]:
        case "missing":
            return "missing_parameter", "this field is required"
        case "extra_forbidden" if len(error["loc"]) == 1 and error["loc"][0] in model.unsupported_fields:
            return "unsupported_parameter", model.unsupported_fields[str(error["loc"][0])].refusal(given)
        case "extra_forbidden":
            return "unknown_parameter", "there is no such field; it would have no effect"
        case "unsupported":
            return "unsupported_parameter", error["msg"] + given
        case "too_long" | "too_short" | "string_too_long" | "string_too_short":
            _, _, text = error["msg"].replace(" after validation", "").partition("should have")
            return "invalid_value", f"must have{text}"
        case "string_pattern_mismatch" if "[key]" in error["loc"]:  # the pattern of TokenKey
            return "invalid_value", "the keys must be token ids, in decimal digits" + given
        case "union_tag_invalid":  # a union of content parts, input items and the like
            tag, supported = error["ctx"]["tag"], error["ctx"]["expected_tags"]
            return "invalid_value", f"the type {shown(tag)} is not supported; supported are {supported}"
        case "content_part":
            return "invalid_value", error["msg"]
        case _:
            text = error["msg"].replace("Input should be", "must be")
            return "invalid_value", text + _range_of(model, error["loc"]) + given


def _range_of(model: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    """Returns " (the range is 0 to 2)" from the field's declared bounds, or "" if it declares none."""
    info = _field_at(model, loc)
    if info is None:
        return ""
    low = high = ""
    for bound in info.metadata:
        match bound:
            case Ge(ge=value):
                low = f"{value}"
            case Gt(gt=value):
                low = f"above {value}"
            case Le(le=value):
                high = f"{value}"
            case Lt(lt=value):
                high = f"below {value}"
    return f" (the range is {low} to {high})" if low and high else ""


def _field_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> FieldInfo | None:
    """Returns the field at `loc`, in `model` or in a model nested in it; None if `loc` is an element of a value."""
    info = None
    for part in loc:
        info = model.model_fields.get(str(part))
        if info is None:
            return None
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            model = info.annotation
    return info
