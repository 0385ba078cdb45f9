"""The reader of multipart bodies: the same parts wherever the body is cut."""

from __future__ import annotations

import pytest

from moeserve.httpserver.batches.multipart import MAX_HEAD_BYTES, MultipartReader, Part
from moeserve.httpserver.transport.errors import ApiError

TYPE = 'multipart/form-data; boundary="bound"'
DATA = b"line 1\r\n--boun\r\n\r\n--bound-not\r\nx"
BODY = (
    b"preamble\r\n--bound\r\n"
    b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b"--bound  \r\n"
    b'content-disposition: form-data; name="file"; filename="a.jsonl"\r\nContent-Type: text/plain\r\n\r\n'
    + DATA.replace(b"\r\n--bound-not", b"\r\n--bounx-not")
    + b"\r\n--bound\r\n"
    b'Content-Disposition: form-data; name="empty"\r\n\r\n\r\n--bound--\r\nepilogue'
)


def parts(body: bytes, size: int) -> list[tuple[str, str | None, bytes]]:
    reader = MultipartReader(TYPE)
    found: list[tuple[str, str | None, bytes]] = []
    for start in range(0, len(body), size):
        for piece in reader.feed(body[start : start + size]):
            if isinstance(piece, Part):
                found.append((piece.name, piece.filename, b""))
            else:
                name, filename, data = found[-1]
                found[-1] = (name, filename, data + piece)
    reader.end()
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_the_parts_are_the_same_wherever_it_is_cut(size: int) -> None:
    data = DATA.replace(b"\r\n--bound-not", b"\r\n--bounx-not")
    assert parts(BODY, size) == [("purpose", None, b"batch"), ("file", "a.jsonl", data), ("empty", None, b"")]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--bound\r\n",
        BODY[:-20],
        b"--bound\r\nContent-Disposition: form-data\r\n\r\nx\r\n--bound--",
        b"--bound\r\n" + b"x" * (MAX_HEAD_BYTES + 1),
        b"--boundary-of-another\r\n\r\n\r\n--bound--",
    ],
)
def test_a_body_that_is_not_whole_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        parts(body, 64)
    assert refused.value.status == 400


def test_other_types_are_refused() -> None:
    with pytest.raises(ApiError) as refused:
        MultipartReader("application/json")
    assert refused.value.status == 415
    with pytest.raises(ApiError):
        MultipartReader("multipart/form-data")
