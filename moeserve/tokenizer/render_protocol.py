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

_BIG_INTEGER = 1  # the code of msgpack's extension for integers of more than 64 bits, in two's complement


def _big_integer(code: int, data: memoryview) -> int:
    if code != _BIG_INTEGER:
        raise ValueError(f"the extension {code} is unknown")
    return int.from_bytes(data, "big", signed=True)


_encode = msgspec.msgpack.Encoder().encode
_request: msgspec.msgpack.Decoder[RenderRequest] = msgspec.msgpack.Decoder(
    RenderRequest, ext_hook=_big_integer
)
_reply: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: RenderRequest | Reply) -> bytes:
    """Raises RecursionError, and what msgspec raises for a value that msgpack cannot hold."""
    try:
        return _encode(message)
    except OverflowError:  # JSON's integers are of any size
        if not isinstance(message, Render):
            raise
        messages, tools, kwargs = map(_extended, (message.messages, message.tools, message.kwargs))
        return _encode(Render(messages, tools, message.add_generation_prompt, kwargs))


def _extended(value: Any) -> Any:
    """Returns the value with its integers of more than 64 bits as extensions."""
    if isinstance(value, dict):
        return {key: _extended(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_extended(one) for one in value]
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return msgspec.msgpack.Ext(
            _BIG_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)
        )
    return value


def decode_request(body: bytes) -> RenderRequest:
    return _request.decode(body)


def decode_reply(body: bytes) -> Reply:
    """Decodes a reply. Raises ValueError for anything else."""
    return _reply.decode(body)
