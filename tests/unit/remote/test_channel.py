"""A channel whose other end goes away."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from moeserve.remote.channel import ConnectionLost, FrameChannel
from moeserve.remote.frames import Kind, encode_frame
from moeserve.remote.tls import gate_context, link_context
from tests.unit.remote.conftest import files


def open_pair(certificates: Path) -> tuple[FrameChannel, FrameChannel]:
    """The two ends of a line, after the handshake."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    ends = (
        FrameChannel(near, link_context(files(certificates, "server"), ""), "127.0.0.1"),
        FrameChannel(far, gate_context(files(certificates, "worker"), "")),
    )
    deadline = time.monotonic() + 60
    while not all(end.is_open for end in ends):
        assert time.monotonic() < deadline
        for end in ends:
            end.turn()
    return ends


def test_what_came_last_is_read_and_what_is_sent_then_is_dropped(certificates: Path) -> None:
    """The other end ends without a word, as a killed one does: who serves the line must not fall with it."""
    near, far = open_pair(certificates)
    far.send(encode_frame(Kind.DATA, b"the last"))
    far.flush()
    far.close()
    assert near.turn() == [(Kind.DATA, b"the last")]
    near.send(encode_frame(Kind.DATA, b"too late"))
    with pytest.raises(ConnectionLost, match="has closed it"):
        near.turn()
    near.close()
