"""The bytes between link and gate: frames in, frames out, and nothing that is too long or unknown."""

from __future__ import annotations

import struct

import pytest

from moeserve.remote.frames import (
    MOST_BYTES,
    MOST_CAUSE,
    End,
    FrameError,
    FrameReader,
    Kind,
    decode_end,
    decode_welcome,
    encode_end,
    encode_frame,
)


@pytest.mark.parametrize("step", [1, 3, 1 << 20])
def test_frames_are_found_however_the_bytes_are_cut(step: int) -> None:
    frames = [(Kind.DATA, b"abc"), (Kind.HEARTBEAT, b""), (Kind.DATA, b""), (Kind.DATA, b"x" * 700)]
    stream = b"".join(encode_frame(kind, content) for kind, content in frames)
    reader = FrameReader()
    found = [frame for at in range(0, len(stream), step) for frame in reader.feed(stream[at : at + step])]
    assert found == frames


@pytest.mark.parametrize("kind", Kind)
def test_a_frame_that_is_too_long_is_refused_by_its_header(kind: Kind) -> None:
    header = struct.pack("!BI", kind, MOST_BYTES[kind] + 1)
    with pytest.raises(FrameError, match=f"{kind.name} frame of {MOST_BYTES[kind] + 1} bytes"):
        list(FrameReader().feed(header))


@pytest.mark.parametrize("number", [0, 5, 255])
def test_an_unknown_kind_is_refused(number: int) -> None:
    with pytest.raises(FrameError, match=f"no frame of kind {number}"):
        list(FrameReader().feed(struct.pack("!BI", number, 0)))


def test_an_end_says_why() -> None:
    ((kind, content),) = FrameReader().feed(encode_end("x" * 5000, by_itself=True))
    assert kind is Kind.END
    assert decode_end(content) == End("x" * MOST_CAUSE, by_itself=True)


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x81\xa7version\x01", b"\x91" * 4000, b"\x80"])
def test_malformed_contents_are_refused(content: bytes) -> None:
    with pytest.raises(FrameError, match="malformed welcome"):
        decode_welcome(content)
    with pytest.raises(FrameError, match="malformed end"):
        decode_end(content)
