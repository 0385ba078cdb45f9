"""From what pydantic found wrong with a body to the 400 that the client gets."""

from __future__ import annotations

import itertools

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from moeserve.httpserver.transport.errors import ApiError, shown


def from_validation(model: type[BaseModel], errors: list[ErrorDetails]) -> ApiError:
    """Returns a 400 that explains the first error in full and counts the others."""
    first = errors[0]
    names = [str(part) for part in first["loc"] if part != "[key]"]
    fields = itertools.takewhile(
        lambda name: "[" not in name, names[1:]
    )  # from a "[" on, types and not fields
    param = ".".join([*names[:1], *fields])
    if not param and first["type"] in model.model_fields:
        param = first["type"]  # fields that disagree: the error is named after the one at fault
    code, message = _explain(model, first)
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return ApiError(400, (f"{param}: {message}" if param else message) + more, param=param or None, code=code)


def _explain(model: type[BaseModel], error: ErrorDetails) -> tuple[str, str]:
    """Returns the error's code and its message."""
    given = "" if isinstance(error["input"], dict) else f", got {shown(error['input'])}"
    match error["type"]:
        case "missing":
            return "missing_parameter", "this field is required"
        case "extra_forbidden":
            return "unknown_parameter", "there is no such field; it would have no effect"
        case "unsupported":
            return "unsupported_parameter", error["msg"] + given
        case "too_long" | "too_short" | "string_too_long" | "string_too_short":
            _, _, text = error["msg"].replace(" after validation", "").partition("should have")
            return "invalid_value", f"must have{text}"
        case "string_pattern_mismatch" if "[key]" in error["loc"]:  # of TokenKey
            return "invalid_value", "the keys must be token ids, in decimal digits" + given
        case "union_tag_invalid":  # of content parts, input items and the like
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
    """Returns the field that `loc` names, in `model` or in a model within it; None for an element of a value."""
    info = None
    for part in loc:
        info = model.model_fields.get(str(part))
        if info is None:
            return None
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            model = info.annotation
    return info
