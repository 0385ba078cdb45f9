"""Typed one-way channels: ZMQ PUSH and PULL over Unix sockets, one message of the schema a frame.

The receiver binds, the senders connect, in any order: a message sent before the receiver is up waits.
Messages of one sender arrive in order, each once, unless the receiver dies.

Bounds, and what happens at them:

- A queue holds HIGH_WATER_MARK messages per sender, on each side. A receiver that is alive drains its queue
  every step, so a full one means a peer that is stuck or dead. `send` then waits SEND_TIMEOUT_S and raises
  ChannelFull: a router or detokenizer lets it end the process (the launcher then ends the server),
  httpserver fails that one request with a 503. Nobody may swallow it.
- `try_send` drops the message and says so. Only for news that the next message makes stale: LoadReport and
  LoadProgress.
- A message over MAX_MESSAGE_BYTES is refused by the sender with CodecError; the receiver would cut the
  connection.
- A closing sender waits LINGER_MS for its last messages to leave.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

from moeserve.messages.codec import CodecError, Decoder, encode

HIGH_WATER_MARK: Final = 8192  # messages
SEND_TIMEOUT_S: Final = 10.0
LINGER_MS: Final = 2000
MAX_MESSAGE_BYTES: Final = 256 << 20  # the longest prompt (2^24 tokens, 64 MiB) and its logprobs by chunk fit

# sockaddr_un.sun_path holds 108 bytes with its closing NUL (Linux, unix(7)).
MAX_IPC_PATH_BYTES: Final = 107

T = TypeVar("T")


class ChannelFull(Exception):
    """The receiver has not drained its queue for SEND_TIMEOUT_S: it is stuck or dead."""


def _check_address(address: str) -> None:
    """Only Unix sockets: nothing inside the server listens on TCP."""
    if not address.startswith("ipc:///"):
        raise ValueError(f"inner sockets are Unix sockets, ipc:///path, not {address!r}")
    if len(address.removeprefix("ipc://").encode()) > MAX_IPC_PATH_BYTES:
        raise ValueError(f"the socket path is longer than {MAX_IPC_PATH_BYTES} bytes: {address}")


def _encode_bounded(message: msgspec.Struct) -> bytes:
    frame = encode(message)
    if len(frame) > MAX_MESSAGE_BYTES:
        raise CodecError(
            f"{type(message).__name__} is {len(frame)} bytes; at most {MAX_MESSAGE_BYTES} are sent"
        )
    return frame


def _connect(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, address: str) -> None:
    _check_address(address)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.SNDTIMEO, int(SEND_TIMEOUT_S * 1000))
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.connect(address)


def _bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, address: str) -> None:
    _check_address(address)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(address)


def _full(message: msgspec.Struct, address: str) -> ChannelFull:
    return ChannelFull(f"{type(message).__name__} not sent: {address} took nothing for {SEND_TIMEOUT_S:g} s")


class PushChannel:
    """The sending end, for one thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.address = address
        self.socket: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        _connect(self.socket, address)

    def send(self, message: msgspec.Struct) -> None:
        """Queues the message. Raises ChannelFull, CodecError."""
        frame = _encode_bounded(message)
        try:
            self.socket.send(frame)
        except zmq.Again as error:
            raise _full(message, self.address) from error

    def try_send(self, message: msgspec.Struct) -> bool:
        """Queues the message, or drops it and returns False when the queue is full."""
        frame = _encode_bounded(message)
        try:
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self.socket.close()


class PullChannel(Generic[T]):
    """The receiving end, for one thread; `socket` may be registered with a zmq.Poller.

    A malformed frame raises CodecError: our own processes are the only senders, so that is a bug.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, decoder: Decoder[T]) -> None:
        self.address = address
        self.socket: zmq.Socket[bytes] = context.socket(zmq.PULL)
        self._decoder = decoder
        _bind(self.socket, address)

    def recv(self, timeout: float | None = None) -> T | None:
        """The next message; waits for it, for ever or `timeout` seconds and then returns None."""
        if timeout is not None and not self.socket.poll(int(timeout * 1000)):
            return None
        return self._decoder.decode(self.socket.recv())

    def drain(self, limit: int = HIGH_WATER_MARK) -> list[T]:
        """What is there now, at most `limit` messages, without waiting."""
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


class AsyncPushChannel:
    """The sending end, for one event loop."""

    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self.address = address
        self.socket: zmq.asyncio.Socket = context.socket(zmq.PUSH)
        _connect(self.socket, address)

    async def send(self, message: msgspec.Struct) -> None:
        """Queues the message, in the order of the calls. Raises ChannelFull, CodecError."""
        frame = _encode_bounded(message)
        try:
            await self.socket.send(frame)
        except zmq.Again as error:
            raise _full(message, self.address) from error

    def close(self) -> None:
        self.socket.close()


class AsyncPullChannel(Generic[T]):
    """The receiving end, for one event loop. A malformed frame raises CodecError."""

    def __init__(self, context: zmq.asyncio.Context, address: str, decoder: Decoder[T]) -> None:
        self.address = address
        self.socket: zmq.asyncio.Socket = context.socket(zmq.PULL)
        self._decoder = decoder
        _bind(self.socket, address)

    async def recv(self) -> T:
        return self._decoder.decode(await self.socket.recv())

    def close(self) -> None:
        self.socket.close()
