"""The messages between a ChatRenderer and its process, as msgpack structs."""

from __future__ import annotations

from typing import Any

import msgspec

MAX_REQUEST_BYTES = 64 << 20


class Compile(msgspec.Struct, frozen=True, tag=True):
    """The first request. Answered by `Rendered("")` or `Failed`."""

    source: str
    variables: dict[str, str]
    max_output_chars: int
    tool_source: str | None = None  # for conversations with tools; None: `source`


class Render(msgspec.Struct, frozen=True, tag=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    kwargs: dict[str, Any]


class Rendered(msgspec.Struct, frozen=True, tag=True):
    text: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    message: str


RenderRequest = Compile | Render
Reply = Rendered | Failed

encode = msgspec.msgpack.Encoder().encode
_request: msgspec.msgpack.Decoder[RenderRequest] = msgspec.msgpack.Decoder(RenderRequest)
_reply: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def decode_request(body: bytes) -> RenderRequest:
    return _request.decode(body)


def decode_reply(body: bytes) -> Reply:
    """ValueError for anything but a reply."""
    return _reply.decode(body)
