"""The protocol between the leader and a follower: msgpack frames over a socket pair."""

from __future__ import annotations

import socket
from typing import Final

import msgspec

from moeserve.messages.codec import Decoder, encode
from moeserve.messages.ranks import ToFollower, ToLeader
from moeserve.processes.sandbox.frames import receive_frame, send_frame

MAX_FRAME_BYTES: Final = 1 << 30  # enough for a step's new sequences with all their tokens

TO_FOLLOWER: Final[Decoder[ToFollower]] = Decoder(ToFollower)
TO_LEADER: Final[Decoder[ToLeader]] = Decoder(ToLeader)


def send(line: socket.socket, message: msgspec.Struct) -> None:
    """Sends a message. Raises ConnectionError if the other side is gone."""
    send_frame(line, encode(message))


def receive_from_leader(line: socket.socket) -> ToFollower:
    """Receives a message. Raises EOFError if the leader is gone."""
    return TO_FOLLOWER.decode(_receive(line))


def receive_from_follower(line: socket.socket) -> ToLeader:
    """Receives a message. Raises EOFError if the follower is gone."""
    return TO_LEADER.decode(_receive(line))


def _receive(line: socket.socket) -> bytes:
    try:
        return receive_frame(line, MAX_FRAME_BYTES)
    except ConnectionResetError as error:  # the other side ended without reading everything
        raise EOFError from error
