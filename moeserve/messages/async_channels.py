"""The channels of `channels.py` for an event loop.

A module of its own, so that processes without an event loop need not import asyncio.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

from moeserve.messages.channels import bind, channel_full, connect, encode_bounded
from moeserve.messages.codec import Decoder

T = TypeVar("T")


class AsyncPushChannel:
    """The sending end, to be used by one event loop."""

    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self.address = address
        self._context = context
        self._open()

    def _open(self) -> None:
        self.socket: zmq.asyncio.Socket = self._context.socket(zmq.PUSH)
        connect(self.socket, self.address)

    def reopen(self) -> None:
        """Prepares for another receiver after the first has ended. The new one gets messages sent from now on, but none
        that the first did not receive."""
        self.socket.close(linger=0)
        self._open()

    async def send(self, message: msgspec.Struct) -> None:
        """Queues the message, in the order of the calls. Raises ChannelFull, CodecError."""
        frame = encode_bounded(message)
        try:
            await self.socket.send(frame)
        except zmq.Again as error:
            raise channel_full(message, self.address) from error

    def close(self) -> None:
        self.socket.close()


class AsyncPullChannel(Generic[T]):
    """The receiving end, to be used by one event loop. A malformed frame raises CodecError."""

    def __init__(self, context: zmq.asyncio.Context, address: str, decoder: Decoder[T]) -> None:
        self.address = address
        self.socket: zmq.asyncio.Socket = context.socket(zmq.PULL)
        self._decoder = decoder
        bind(self.socket, address)

    async def recv(self) -> T:
        return self._decoder.decode(await self.socket.recv())

    def close(self) -> None:
        self.socket.close()
