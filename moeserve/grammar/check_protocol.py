"""The messages between a GrammarChecker and its process, as msgpack structs. The request is a GrammarSpec."""

from __future__ import annotations

import msgspec

from .spec import GrammarSpec

MAX_REQUEST_BYTES = 16 << 20
MAX_GRAMMAR_BYTES = 16 << 20


class Accepted(msgspec.Struct, frozen=True, tag=True):
    grammar: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    message: str


Reply = Accepted | Refused

encode = msgspec.msgpack.Encoder().encode
_spec: msgspec.msgpack.Decoder[GrammarSpec] = msgspec.msgpack.Decoder(GrammarSpec)
_reply: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def decode_spec(body: bytes) -> GrammarSpec:
    return _spec.decode(body)


def decode_reply(body: bytes) -> Reply:
    """Decodes a reply. Raises ValueError for anything else."""
    return _reply.decode(body)
