"""Typed one-way channels: ZMQ PUSH and PULL over Unix sockets, with one message of the schema in each frame.

The receiver binds and the senders connect, in any order: a message that is sent before the receiver runs waits.
Messages of one sender arrive in order, each once, unless the receiver dies.

Limits, and what happens when they are reached:

- A queue holds HIGH_WATER_MARK messages for each sender, on each side. A healthy receiver drains its queue at every
  step, so a full queue means that the peer is stuck or dead. `send` then waits SEND_TIMEOUT_S and raises ChannelFull.
  In the router and the detokenizer this ends the process, and the launcher starts another; httpserver answers that
  request with a 503. No caller may ignore the error.
- `try_send` drops the message and returns False. Use it only for messages that the next message of the same type
  replaces, or that are requested again: LoadReport, LoadProgress, Heartbeat and ExpertUse.
- The sender refuses a message over MAX_MESSAGE_BYTES with CodecError, because the receiver would close the connection.
- A sender that closes waits LINGER_MS for its last messages to be sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, TypeVar

import msgspec
import zmq

from moeserve.messages.codec import CodecError, Decoder, encode

if TYPE_CHECKING:
    import zmq.asyncio

HIGH_WATER_MARK: Final = 8192  # messages
SEND_TIMEOUT_S: Final = 10.0
LINGER_MS: Final = 2000
MAX_MESSAGE_BYTES: Final = 256 << 20  # the longest prompt (2^24 tokens, 64 MiB) and its logprobs by chunk fit

# sockaddr_un.sun_path holds 108 bytes with its closing NUL (Linux, unix(7)).
MAX_IPC_PATH_BYTES: Final = 107

T = TypeVar("T")


class ChannelFull(Exception):
    """The receiver has not drained its queue for SEND_TIMEOUT_S, so it is stuck or dead."""


def _check_address(address: str) -> None:
    """Raises ValueError for anything but a Unix socket: the server's processes never listen on TCP for each other."""
    if not address.startswith("ipc:///"):
        raise ValueError(f"inner sockets are Unix sockets, ipc:///path, not {address!r}")
    if len(address.removeprefix("ipc://").encode()) > MAX_IPC_PATH_BYTES:
        raise ValueError(f"the socket path is longer than {MAX_IPC_PATH_BYTES} bytes: {address}")


def encode_bounded(message: msgspec.Struct) -> bytes:
    frame = encode(message)
    if len(frame) > MAX_MESSAGE_BYTES:
        raise CodecError(
            f"{type(message).__name__} is {len(frame)} bytes; at most {MAX_MESSAGE_BYTES} are sent"
        )
    return frame


def connect(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, address: str) -> None:
    _check_address(address)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.SNDTIMEO, int(SEND_TIMEOUT_S * 1000))
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.connect(address)


def bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, address: str) -> None:
    _check_address(address)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(address)


def channel_full(message: msgspec.Struct, address: str) -> ChannelFull:
    return ChannelFull(f"{type(message).__name__} not sent: {address} read nothing for {SEND_TIMEOUT_S:g} s")


class PushChannel:
    """The sending end, to be used by one thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.address = address
        self.socket: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        connect(self.socket, address)

    def send(self, message: msgspec.Struct) -> None:
        """Queues the message. Raises ChannelFull, CodecError."""
        frame = encode_bounded(message)
        try:
            self.socket.send(frame)
        except zmq.Again as error:
            raise channel_full(message, self.address) from error

    def try_send(self, message: msgspec.Struct) -> bool:
        """Queues the message, or drops it and returns False when the queue is full."""
        frame = encode_bounded(message)
        try:
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self.socket.close()


class PullChannel(Generic[T]):
    """The receiving end, to be used by one thread; `socket` may be registered with a zmq.Poller.

    A malformed frame raises CodecError. Only the server's own processes send, so it means a bug in one of them.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, decoder: Decoder[T]) -> None:
        self.address = address
        self.socket: zmq.Socket[bytes] = context.socket(zmq.PULL)
        self._decoder = decoder
        bind(self.socket, address)

    def recv(self, timeout: float | None = None) -> T | None:
        """Waits for the next message. With `timeout` (seconds), returns None when none has arrived by then."""
        if timeout is not None and not self.socket.poll(int(timeout * 1000)):
            return None
        return self._decoder.decode(self.socket.recv())

    def drain(self, limit: int = HIGH_WATER_MARK) -> list[T]:
        """Returns the messages that have arrived, at most `limit`, without waiting."""
        messages: list[T] = []
        while len(messages) < limit:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            messages.append(self._decoder.decode(frame))
        return messages

    def close(self) -> None:
        self.socket.close()
