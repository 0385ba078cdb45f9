"""PictureClient: sends pictures and videos to the visual server, one at a time, and returns the files of their
embeddings."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from moeserve.httpserver.generation.request.pictures import Picture
from moeserve.httpserver.transport.errors import ApiError, invalid
from moeserve.messages.async_channels import AsyncPushChannel
from moeserve.messages.channels import ChannelFull
from moeserve.messages.pictures import EncodePicture, PictureEncoded, PictureRefused
from moeserve.messages.prompt_embeddings import MOST_BYTES
from moeserve.processes.embedding_files import EmbeddingFiles, Owner
from moeserve.processes.sandbox.line import FairLine

if TYPE_CHECKING:
    from moeserve.httpserver.generation.engine.picture_fetcher import PictureFetcher

# Crashes of the visual server with the same picture, after which the picture is refused.
MOST_LOSSES: Final = 2
# The most bytes of embeddings that open requests hold. One more picture may exceed it, because its size is known only
# when it is encoded. A tenant leaves room for a prompt of another's.
MOST_HELD_BYTES: Final = 4 * MOST_BYTES
MOST_TENANT_BYTES: Final = MOST_HELD_BYTES - MOST_BYTES

log = logging.getLogger(__name__)


class EncodedPicture:
    """A picture's embeddings. Their files exist as long as this object."""

    def __init__(self, found: PictureEncoded, remove: Callable[[str], None], num_bytes: int = 0) -> None:
        self.rows = found.rows  # tokens
        self.columns = found.columns
        self.parts = found.parts
        self.num_bytes = num_bytes
        self.times = found.times  # of a video's parts
        for _, handle in found.parts:
            weakref.finalize(self, remove, handle)


class _Held(NamedTuple):
    tenant: str
    num_bytes: int


class _Asked:
    """The picture that the visual server is encoding."""

    def __init__(self, message: EncodePicture, tenant: str) -> None:
        self.message = message
        self.tenant = tenant
        self.answer: asyncio.Future[PictureEncoded | PictureRefused] = (
            asyncio.get_running_loop().create_future()
        )
        self.losses = 0
        self.is_wanted = True  # its client still waits


class PictureClient:
    """Belongs to one event loop. Tenants take turns, so a tenant's many pictures delay only that tenant."""

    def __init__(
        self,
        to_visualserver: AsyncPushChannel,
        files: EmbeddingFiles,
        fetcher: PictureFetcher,
        observe: Callable[[PictureEncoded], None],
    ) -> None:
        """fetcher: downloads pictures that are given as URLs. observe: called with every encoded picture. Removes the
        files that a killed httpserver left behind."""
        self._channel = to_visualserver
        self._files = files
        # The files of the answers that are in use, by handle. Any thread may remove one.
        self._held: dict[str, _Held] = {}
        files.remove_left(Owner.SENDER)
        self._fetcher = fetcher
        self._observe = observe
        # The visual server may still send answers to the httpserver before this one: a random first id keeps them
        # apart.
        self._ids = itertools.count(secrets.randbits(62))
        self._line = FairLine()
        self._asked: _Asked | None = None

    async def encode(self, picture: Picture, tenant: str, param: str) -> EncodedPicture:
        """Fetches the picture if it is a URL, and returns its embeddings from the visual server. Raises ApiError if
        that fails, or if open requests hold too many embeddings."""
        data = await self._file(picture, param)
        frames = tuple([await self._file(frame, param) for frame in picture.frames])
        message = EncodePicture(
            next(self._ids), data, picture.max_tokens, picture.video, frames, picture.pixels
        )
        asked = _Asked(message, tenant)
        turn = asyncio.create_task(self._take_turn(asked))
        try:
            answer = await asyncio.shield(turn)
        except asyncio.CancelledError:
            asked.is_wanted = False
            turn.add_done_callback(self._drop)
            # Otherwise the visual server has the picture, and gets no other one before it has finished.
            if asked is not self._asked:
                turn.cancel()
            raise
        if isinstance(answer, PictureRefused):
            if answer.status == 400:
                raise invalid(param, f"the {picture.what} {answer.message}")
            raise ApiError(answer.status, f"the {picture.what} {answer.message}", code="picture_error")
        self._observe(answer)
        num_bytes = sum(self._held[handle].num_bytes for _, handle in answer.parts)
        return EncodedPicture(answer, self._remove, num_bytes)

    async def _file(self, picture: Picture, param: str) -> bytes:
        """Returns the file's bytes. Raises ApiError."""
        if picture.url is None:
            return picture.data
        return await self._fetcher.fetch(picture.url, param, picture.what)

    async def _take_turn(self, asked: _Asked) -> PictureEncoded | PictureRefused:
        """Sends the picture when its tenant's turn comes, and waits for the answer. Raises ApiError if open requests
        hold too many embeddings, or if the visual server's queue is full."""
        async with self._line.turn(asked.tenant):
            self._check_room(asked.tenant)
            self._asked = asked
            try:
                await self._send(asked)
                return await asked.answer
            finally:
                self._asked = None

    def _check_room(self, tenant: str) -> None:
        """Raises ApiError. To wait would not do: requests that hold pictures may wait for one another."""
        held = list(self._held.values())
        total = sum(each.num_bytes for each in held)
        own = sum(each.num_bytes for each in held if each.tenant == tenant)
        if total >= MOST_HELD_BYTES or own >= MOST_TENANT_BYTES:
            message = "open requests hold too many pictures; send it again when some of them have ended"
            raise ApiError(503, message, code="overloaded")

    def _drop(self, turn: asyncio.Task[PictureEncoded | PictureRefused]) -> None:
        """Handles the disconnect of a picture's client."""
        if (
            not turn.cancelled()
            and turn.exception() is None
            and isinstance(answer := turn.result(), PictureEncoded)
        ):
            for _, handle in answer.parts:
                self._remove(handle)

    def _remove(self, handle: str) -> None:
        self._held.pop(handle, None)
        self._files.remove(handle)

    def received(self, message: PictureEncoded | PictureRefused) -> None:
        asked = self._asked
        if asked is not None and asked.message.id == message.id and not asked.answer.done():
            if isinstance(message, PictureEncoded):
                self._hold(message, asked.tenant)
            asked.answer.set_result(message)
        # From a visual server that was lost after it had sent the message.
        elif isinstance(message, PictureEncoded):
            for _, handle in message.parts:
                self._files.remove(handle)

    def _hold(self, message: PictureEncoded, tenant: str) -> None:
        for _, handle in message.parts:
            self._held[handle] = _Held(tenant, self._files.size(handle))

    async def lost(self, *, by_itself: bool) -> None:
        """Handles the loss of a visual server, which is being replaced. Removes the file that the lost server may have
        written without answering."""
        self._channel.reopen()
        self._files.remove_left(Owner.SENDER, self._held)
        asked = self._asked
        if asked is None or asked.answer.done():
            return
        asked.losses += by_itself
        if not asked.is_wanted:
            asked.answer.set_result(PictureRefused(asked.message.id, 503, "has no client any more"))
        elif asked.losses < MOST_LOSSES:
            # A new id: a late answer to the old one names a file that has been removed.
            asked.message = replace(asked.message, id=next(self._ids))
            await self._send(asked)
        else:
            message = "ended the process that encodes pictures, twice"
            asked.answer.set_result(PictureRefused(asked.message.id, 500, message))

    async def _send(self, asked: _Asked) -> None:
        """Raises ApiError if the visual server's queue is full."""
        try:
            await self._channel.send(asked.message)
        except ChannelFull as error:
            raise ApiError(
                503,
                "pictures cannot be processed at the moment; try again in a few seconds",
                code="overloaded",
            ) from error

    def close(self) -> None:
        self._channel.close()
