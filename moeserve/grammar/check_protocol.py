"""What a GrammarChecker and its process tell each other, as msgpack structs. The question is a Wish."""

from __future__ import annotations

import msgspec

from .wish import Wish

MAX_REQUEST_BYTES = 16 << 20
MAX_GRAMMAR_BYTES = 16 << 20


class Accepted(msgspec.Struct, frozen=True, tag=True):
    grammar: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    message: str


Reply = Accepted | Refused

encode = msgspec.msgpack.Encoder().encode
_wish: msgspec.msgpack.Decoder[Wish] = msgspec.msgpack.Decoder(Wish)
_reply: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def decode_wish(body: bytes) -> Wish:
    return _wish.decode(body)


def decode_reply(body: bytes) -> Reply:
    """ValueError for anything but a reply."""
    return _reply.decode(body)
