"""Frames through a remote worker's gate."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from moeserve.remote.channel import FrameChannel
from moeserve.remote.frames import Kind
from moeserve.remote.tls import link_context
from tests.unit.remote.conftest import RunningGate, files

SILENCE_S = 30.0  # for a test that waits for bytes to fail


def channel_to(gate: RunningGate, certificates: Path, name: str = "127.0.0.1") -> FrameChannel:
    context = link_context(files(certificates, "server"), "--worker-ssl-")
    return FrameChannel(socket.create_connection(gate.address), context, name)


def frames_of(channel: FrameChannel, seconds: float = SILENCE_S) -> list[tuple[Kind, bytes]]:
    """The next ones. Raises ConnectionLost, TimeoutError."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if frames := channel.turn():
            return frames
        time.sleep(0.005)
    raise TimeoutError
