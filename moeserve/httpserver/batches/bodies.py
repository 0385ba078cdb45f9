"""The request bodies of /v1/batches and /v1/messages/batches.

Source: OpenAI's API reference (Batch) and Anthropic's (Message Batches), and their Python clients' types.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from moeserve.httpserver.batches.input_lines import route_of
from moeserve.httpserver.transport.request_model import Label, RequestModel

HOUR_S: Final = 3600
MOST_HOURS: Final = 14 * 24
MAX_EXPIRY_S: Final = 30 * 86400
ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


def _endpoint(text: str) -> str:
    route = route_of(text)
    if route not in ENDPOINTS:
        message = "must be one of {known}, got {given}"
        raise PydanticCustomError("endpoint", message, {"known": ", ".join(ENDPOINTS), "given": text[:80]})
    return route


def window_seconds(text: str) -> int:
    """Returns the seconds of a completion window such as "24h". Raises PydanticCustomError for a text of another
    form."""
    number, unit = text[:-1], text[-1:]
    hours = int(number) * {"h": 1, "d": 24}.get(unit, 0) if number.isascii() and number.isdecimal() else 0
    if len(text) > 5 or not 1 <= hours <= MOST_HOURS:
        message = 'must be a number of hours or days up to 14 days, such as "24h" or "3d"'
        raise PydanticCustomError("completion_window", message)
    return hours * HOUR_S


def _window(text: str) -> str:
    window_seconds(text)
    return text


class ExpiresAfter(RequestModel):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=HOUR_S, le=MAX_EXPIRY_S)]


class UploadFileForm(RequestModel):
    """Documents the form. It is not parsed into this class, but streamed to disk (`file_routes.py`)."""

    file: Annotated[str, Field(json_schema_extra={"format": "binary"}, description="JSON Lines, in UTF-8.")]
    purpose: Literal["batch"]
    expires_after: Annotated[
        ExpiresAfter | None,
        Field(
            description="As two fields, `expires_after[anchor]` and `expires_after[seconds]`. Default: never."
        ),
    ] = None


class CreateBatchRequest(RequestModel):
    input_file_id: Annotated[str, Field(max_length=200, description="A file with the purpose batch.")]
    endpoint: Annotated[str, AfterValidator(_endpoint), Field(description="The path of its requests.")]
    completion_window: Annotated[
        str, AfterValidator(_window), Field(description='Hours or days until it expires, as "24h" or "3d".')
    ] = "24h"
    metadata: Annotated[dict[str, Label] | None, Field(max_length=16)] = None
    output_expires_after: Annotated[
        ExpiresAfter | None, Field(description="When its result files are removed. Default: after 30 days.")
    ] = None


class MessageBatchRequestItem(RequestModel):
    """One request of a message batch."""

    custom_id: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$", description="Unique in the batch.")]
    params: Annotated[dict[str, Any], Field(description="The body of a request to /v1/messages.")]


class CreateMessageBatchRequest(RequestModel):
    """Documents the body. It is not parsed into this class, but streamed to disk (`message_batch_input.py`)."""

    empty: ClassVar[frozenset[str]] = frozenset()
    requests: Annotated[list[MessageBatchRequestItem], Field(min_length=1, max_length=100_000)]


class RawItem(msgspec.Struct):
    """One request of a message batch, with `params` not parsed yet."""

    custom_id: str
    params: msgspec.Raw


class RawBatch(msgspec.Struct):
    requests: list[RawItem]
