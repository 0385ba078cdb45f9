"""Parses a multipart/form-data body (RFC 7578) while it arrives. A file's bytes are passed on and not kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from enum import Enum, auto
from typing import Final

from moeserve.httpserver.transport.errors import ApiError

MAX_HEAD_BYTES: Final = 8 << 10  # largest head of a part
MAX_PARTS: Final = 64
_BOUNDARY: Final = re.compile(r"[\x20-\x7e]{1,70}")


@dataclass(frozen=True)
class Part:
    """The head of a part; the part's bytes follow."""

    name: str
    filename: str | None  # None: the part is a form field, not a file


class _At(Enum):
    FIRST = auto()  # before the first delimiter
    DELIMITER = auto()  # right after a delimiter
    HEAD = auto()
    BODY = auto()
    END = auto()


class MultipartReader:
    """Reads a multipart body in pieces: for each part `feed` yields a Part, then the part's bytes."""

    def __init__(self, content_type: str) -> None:
        """Raises ApiError: 415 if the type is not multipart/form-data, 400 without a boundary."""
        header = Message()
        header["content-type"] = content_type
        if header.get_content_type() != "multipart/form-data":
            shown = content_type[:80]
            raise ApiError(415, f"send files as multipart/form-data, not as {shown!r}", code="content_type")
        boundary = header.get_param("boundary")
        if not isinstance(boundary, str) or _BOUNDARY.fullmatch(boundary) is None:
            raise _broken("its Content-Type has no boundary")
        self._delimiter = b"\r\n--" + boundary.encode()
        self._held = b"\r\n"  # the first delimiter may be at the very beginning
        self._at = _At.FIRST
        self._parts = 0

    def feed(self, data: bytes) -> Iterator[Part | bytes]:
        """Takes the next bytes of the body. Raises ApiError 400."""
        self._held += data
        while True:
            before = (self._at, len(self._held))
            yield from self._step()
            if (self._at, len(self._held)) == before:
                return

    def end(self) -> None:
        """Ends the body. Raises ApiError 400 if it is incomplete."""
        if self._at is not _At.END:
            raise _broken("it ends before its last boundary")

    def _step(self) -> Iterator[Part | bytes]:
        match self._at:
            case _At.FIRST | _At.BODY:
                yield from self._until_delimiter()
            case _At.DELIMITER:
                self._after_delimiter()
            case _At.HEAD:
                yield from self._head()
            case _At.END:
                self._held = b""

    def _until_delimiter(self) -> Iterator[bytes]:
        place = self._held.find(self._delimiter)
        is_there = place >= 0
        cut = place if is_there else max(len(self._held) - len(self._delimiter) + 1, 0)
        piece, self._held = self._held[:cut], self._held[cut + (len(self._delimiter) if is_there else 0) :]
        if piece and self._at is _At.BODY:
            yield piece
        if is_there:
            self._at = _At.DELIMITER

    def _after_delimiter(self) -> None:
        rest = self._held.lstrip(b" \t")
        if rest.startswith(b"--"):
            self._at = _At.END
        elif rest.startswith(b"\r\n"):
            self._held, self._at = rest, _At.HEAD  # the line end is part of the head, which may be empty
        elif len(rest) >= 2:
            raise _broken("a boundary is not at a line's end")

    def _head(self) -> Iterator[Part]:
        end = self._held.find(b"\r\n\r\n")
        if end < 0:
            if len(self._held) > MAX_HEAD_BYTES:
                raise _broken(f"the head of a part has more than {MAX_HEAD_BYTES} bytes")
            return
        head, self._held = self._held[2:end], self._held[end + 4 :]
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _broken(f"it has more than {MAX_PARTS} parts")
        self._at = _At.BODY
        yield _part(head)


def _part(head: bytes) -> Part:
    for line in head.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            header = Message()
            header["content-disposition"] = value.strip()
            field, filename = header.get_param("name", header="content-disposition"), header.get_filename()
            if isinstance(field, str):
                return Part(field[:200], None if filename is None else str(filename)[:255])
    raise _broken("a part has no name")


def _broken(why: str) -> ApiError:
    return ApiError(
        400,
        f"the body is no whole multipart/form-data: {why}; let an HTTP library write the form, as "
        "curl -F does",
        code="invalid_multipart",
    )
