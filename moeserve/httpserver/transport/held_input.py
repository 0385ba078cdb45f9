"""A connection's received but unparsed bytes, handed to the parser in slices.

One read may bring 256 KiB: thousands of requests or chunks. Every slice is short, so it is quick to parse. A slice
never extends beyond the end of a message, so a connection's next request is parsed only after the one before it is
answered. The place where a slice ends does not change the parser's result."""

from __future__ import annotations

from typing import Final

END: Final = b"\r\n\r\n"  # the end of a head, and of a chunked body
HEAD_SLICE: Final = 16 << 10  # bytes
CHUNKS_SLICE: Final = 4 << 10  # 700 of the smallest chunks, which take a millisecond
BLANKS_SLICE: Final = 4 << 10  # they take 2 ns a byte
BODY_SLICE: Final = 64 << 10
_BLANKS: Final = b"\r\n"


class HeldInput:
    """Stores received bytes until they are parsed. The parser's callbacks `begin_body`, `body_came` and `end_message`
    track the position within a message."""

    def __init__(self) -> None:
        self._data = b""
        self._given = 0  # bytes of `_data` that have been handed out
        self._tail = b""  # the last bytes handed out: the end of a message may have begun in them
        self._body: int | None = (
            0  # bytes still to come of a body with a Content-Length; None: the body is chunked
        )

    def __len__(self) -> int:
        return len(self._data) - self._given

    @property
    def has_rest_of_body(self) -> bool:
        """Returns whether the rest of a body with a Content-Length has arrived and fits into a slice."""
        return self._body is not None and 0 < self._body <= min(len(self), BODY_SLICE)

    def add(self, data: bytes) -> None:
        self._data = self._data[self._given :] + data if self else data
        self._given = 0

    def clear(self) -> None:
        self._data, self._given = b"", 0

    def skip_blank_lines(self) -> int:
        """Drops line ends before a message, which HTTP allows: a slice of them at most. Returns their number of
        bytes."""
        window = self._data[self._given : self._given + BLANKS_SLICE]
        skipped = len(window) - len(window.lstrip(_BLANKS))
        self._given += skipped
        return skipped

    def next_slice(self) -> bytes:
        """Returns the next bytes to parse, at most up to the end of the message."""
        if self._body:
            return self._take(min(self._body, BODY_SLICE))
        most = CHUNKS_SLICE if self._body is None else HEAD_SLICE
        window = self._tail + self._data[self._given : self._given + most]
        found = window.find(END)
        if found < 0:
            self._tail = window[1 - len(END) :]
            return self._take(most)
        taken = found + len(END) - len(self._tail)
        self._tail = b""
        return self._take(taken)

    def _take(self, size: int) -> bytes:
        taken = self._data[self._given : self._given + size]
        self._given += len(taken)
        return taken

    # ------------------------------------------------------------ what the parser has found

    def begin_body(self, length: int | None) -> None:
        """Begins a body. length: in bytes; None for a chunked body."""
        self._body = length

    def body_came(self, size: int) -> None:
        if self._body is not None:
            self._body -= size

    def end_message(self) -> None:
        self._body, self._tail = 0, b""
