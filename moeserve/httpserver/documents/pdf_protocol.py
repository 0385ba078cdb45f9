"""The messages between a PdfReader and its process. The request is the PDF's bytes, the reply a msgpack struct."""

from __future__ import annotations

from typing import Final

import msgspec

MAX_PDF_BYTES: Final = 32 << 20  # more than a body can hold
MAX_TEXT_BYTES: Final = 8 << 20  # of UTF-8
MAX_PAGES: Final = 2000
MOST_MESSAGE: Final = 300  # characters


class Read(msgspec.Struct, frozen=True, tag=True):
    text: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    message: str


Reply = Read | Refused

encode = msgspec.msgpack.Encoder().encode
_reply: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def decode_reply(body: bytes) -> Reply:
    """Decodes a reply. Raises ValueError for anything else."""
    return _reply.decode(body)
