"""Errors as the OpenAI API shapes them: `{"error": {"message", "type", "param", "code"}}`; for Anthropic's paths
as Anthropic's does: `{"type": "error", "error": {"type", "message"}}`.

Every refusal of this process is an `ApiError`; the exception handlers in `app.py` write it. A message names
the field, the value that was given and what is allowed.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from typing_extensions import TypedDict

from moeserve.httpserver.anthropic.objects import MessagesError

_TYPES: Final = {401: "authentication_error", 404: "not_found_error", 503: "service_unavailable"}
_MESSAGES_TYPES: Final = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
MESSAGES_PATH: Final = "/v1/messages"
MAX_SHOWN_CHARS: Final = 80  # of a value in a message
RETRY_AFTER_S: Final = "5"


class ErrorInfo(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorInfo


class ApiError(Exception):
    """A request that ends with an HTTP error. `param` is the field at fault, `code` a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after  # seconds, with a 503; None: RETRY_AFTER_S

    def body(self) -> ErrorBody:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        match self.status:
            case 401:
                return {"www-authenticate": "Bearer"}
            case 503:
                return {"retry-after": RETRY_AFTER_S if self.retry_after is None else str(self.retry_after)}
            case 413:
                return {"connection": "close"}  # the rest of the body is not read
        return {}


def error_body(path: str, error: ApiError, request_id: str | None) -> ErrorBody | MessagesError:
    """In the shape that the clients of this path expect."""
    return messages_error(error, request_id) if path.startswith(MESSAGES_PATH) else error.body()


def messages_error(error: ApiError, request_id: str | None) -> MessagesError:
    kind = _MESSAGES_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": error.message},
        "request_id": request_id,
    }


def invalid(param: str, message: str) -> ApiError:
    """A 400 for a value that only the running server can judge, such as a token id beyond the vocabulary."""
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")


def from_validation(model: type[BaseModel], errors: list[ErrorDetails]) -> ApiError:
    """The 400 for what pydantic found: the first error in full, and how many more there are."""
    first = errors[0]
    names = [str(part) for part in first["loc"] if part != "[key]"]
    fields = itertools.takewhile(lambda name: "[" not in name, names[1:])  # behind it is no field, but a type
    param = ".".join([*names[:1], *fields])
    if not param and first["type"] in model.model_fields:
        param = first["type"]  # fields that disagree: the error is named after the one at fault
    code, message = _explain(model, first)
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return ApiError(400, (f"{param}: {message}" if param else message) + more, param=param or None, code=code)


def _explain(model: type[BaseModel], error: ErrorDetails) -> tuple[str, str]:
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
    """ " (the range is 0 to 2)", from the constraints the field declares; "" where it declares none."""
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
    """The field that `loc` names, in `model` or in a model within it; None for an element of a value."""
    info = None
    for part in loc:
        info = model.model_fields.get(str(part))
        if info is None:
            return None
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            model = info.annotation
    return info


def shown(value: Any) -> str:
    """A value for a message, cut where it is long."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = repr(value[: MAX_SHOWN_CHARS + 1] if isinstance(value, str) else value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."
