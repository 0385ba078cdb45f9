"""Anthropic's error shape: `{"type": "error", "error": {"type", "message"}}`."""

from __future__ import annotations

from typing import Any, Final, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from moeserve.httpserver.transport.errors import ApiError

_TYPES: Final = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


class MessagesErrorInfo(TypedDict):
    type: str
    message: str
    details: NotRequired[dict[str, Any]]


class MessagesError(TypedDict):
    type: Literal["error"]
    error: MessagesErrorInfo
    request_id: str


def _message(error: ApiError) -> str:
    """Returns the error's message. A prompt that is too long gets Anthropic's own wording: its clients parse the
    numbers and then compact the conversation."""
    if error.overflow is None:
        return error.message
    return f"prompt is too long: {error.overflow.prompt} tokens > {error.overflow.limit} maximum"


def messages_error(error: ApiError, request_id: str) -> MessagesError:
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    info: MessagesErrorInfo = {"type": kind, "message": _message(error)}
    if error.details is not None:
        info["details"] = dict(error.details)
    return {
        "type": "error",
        "error": info,
        "request_id": request_id,
    }
