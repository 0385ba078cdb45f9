"""ApiError, the exception for every refused request, and the default shape of error bodies, which is OpenAI's:
`{"error": {"message", "type", "param", "code"}}`. An API with another shape sets `Api.error_body`.

A message names the field, the value that was given and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from typing_extensions import TypedDict

from moeserve.messages.refusal import Refusal

# The kind of refusal by status. A failure of the server (500) is not a refusal.
_REFUSALS: Final = {
    400: Refusal.INVALID,
    401: Refusal.AUTH,
    403: Refusal.FORBIDDEN,
    404: Refusal.NOT_FOUND,
    405: Refusal.NOT_FOUND,
    408: Refusal.TIMEOUT,
    413: Refusal.TOO_LARGE,
    414: Refusal.TOO_LARGE,
    415: Refusal.UNSUPPORTED,
    431: Refusal.TOO_LARGE,
    501: Refusal.UNSUPPORTED,
    503: Refusal.UNAVAILABLE,
    504: Refusal.TIMEOUT,
}
_TYPES: Final = {401: "authentication_error", 404: "not_found_error", 503: "service_unavailable"}
MAX_SHOWN_CHARS: Final = 80  # characters of a value quoted in a message
RETRY_AFTER_S: Final = "5"
CLIENT_CLOSED_REQUEST: Final = 499  # nginx's status for a client that disconnected before its answer began


class ErrorInfo(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorInfo


class Overflow(NamedTuple):
    """The length of a prompt that is too long, and the limit, in tokens. Some APIs' clients parse both from the error
    message."""

    prompt: int
    limit: int


class ApiError(Exception):
    """A request that ends with an HTTP error. `param` is the field at fault, `code` a machine-readable word."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        details: Mapping[str, Any] | None = None,
        refusal: Refusal | None = None,
        overflow: Overflow | None = None,
    ) -> None:
        """refusal: None derives it from the status. overflow: set if the prompt is too long."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.refusal = refusal or _REFUSALS.get(status)  # None: the request failed
        self.code = code
        self.overflow = overflow
        self.details = details  # machine-readable, for APIs whose errors have details
        self.retry_after = retry_after  # seconds, with a 503; None: RETRY_AFTER_S

    def body(self) -> ErrorBody:
        """Returns the error in the default shape."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        match self.status:
            case 401:
                return {"www-authenticate": "Bearer"}
            case 503:
                return {"retry-after": RETRY_AFTER_S if self.retry_after is None else str(self.retry_after)}
            case 413:
                return {"connection": "close"}  # because the rest of the body is not read
        return {}


def invalid(param: str, message: str) -> ApiError:
    """Returns a 400 for a value that depends on the running server, such as a token id beyond the vocabulary."""
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")


def shutting_down() -> ApiError:
    message = "the server is shutting down"
    return ApiError(503, message, code="shutting_down", refusal=Refusal.SHUTTING_DOWN)


def shown(value: Any) -> str:
    """Returns a value as text for a message, cut to MAX_SHOWN_CHARS characters."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = repr(value[: MAX_SHOWN_CHARS + 1] if isinstance(value, str) else value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."
