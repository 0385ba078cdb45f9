"""PictureClient: sends pictures to the visual server, one at a time, and says where their embeddings lie."""

from __future__ import annotations

import asyncio
import itertools
import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from moeserve.httpserver.generation.request.pictures import Picture
from moeserve.httpserver.transport.errors import ApiError, invalid
from moeserve.messages.async_channels import AsyncPushChannel
from moeserve.messages.channels import ChannelFull
from moeserve.messages.pictures import EncodePicture, PictureEncoded, PictureRefused
from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.processes.sandbox.line import FairLine

if TYPE_CHECKING:
    from moeserve.httpserver.generation.engine.picture_fetcher import PictureFetcher

MOST_LOSSES: Final = 2  # of visual servers, after which a picture counts as what they are lost of

log = logging.getLogger(__name__)


class EncodedPicture:
    """The embeddings' file is there as long as this object."""

    def __init__(self, found: PictureEncoded, files: EmbeddingFiles) -> None:
        self.rows = found.rows  # tokens
        self.columns = found.columns
        self.sha256 = found.sha256
        self.handle = found.handle
        weakref.finalize(self, files.remove, found.handle)


class _Asked:
    """The picture that the visual server has."""

    def __init__(self, message: EncodePicture) -> None:
        self.message = message
        self.answer: asyncio.Future[PictureEncoded | PictureRefused] = (
            asyncio.get_running_loop().create_future()
        )
        self.losses = 0


class PictureClient:
    """For one event loop. Tenants take turns: who sends many pictures waits behind himself."""

    def __init__(
        self,
        to_visualserver: AsyncPushChannel,
        files: EmbeddingFiles,
        fetcher: PictureFetcher,
        observe: Callable[[PictureEncoded], None],
    ) -> None:
        """fetcher: of pictures that are addresses. observe: is told of every picture that was encoded."""
        self._channel = to_visualserver
        self._files = files
        self._fetcher = fetcher
        self._observe = observe
        self._ids = itertools.count(1)
        self._line = FairLine()
        self._asked: _Asked | None = None

    async def encode(self, picture: Picture, tenant: str, param: str) -> EncodedPicture:
        """Raises ApiError."""
        data = picture.data if picture.url is None else await self._fetcher.fetch(picture.url, param)
        asked = _Asked(EncodePicture(next(self._ids), data, picture.max_tokens))
        turn = asyncio.create_task(self._take_turn(asked, tenant))
        try:
            answer = await asyncio.shield(turn)
        except asyncio.CancelledError:
            if asked is self._asked:  # the visual server has it: no other picture is sent before it is done
                turn.add_done_callback(self._drop)
            else:
                turn.cancel()
            raise
        if isinstance(answer, PictureRefused):
            if answer.status == 400:
                raise invalid(param, f"the picture {answer.message}")
            raise ApiError(answer.status, f"the picture {answer.message}", code="picture_error")
        self._observe(answer)
        return EncodedPicture(answer, self._files)

    async def _take_turn(self, asked: _Asked, tenant: str) -> PictureEncoded | PictureRefused:
        """Raises ApiError."""
        async with self._line.turn(tenant):
            self._asked = asked
            try:
                await self._send(asked)
                return await asked.answer
            finally:
                self._asked = None

    def _drop(self, turn: asyncio.Task[PictureEncoded | PictureRefused]) -> None:
        """The client of a picture has disconnected."""
        if turn.exception() is None and isinstance(answer := turn.result(), PictureEncoded):
            self._files.remove(answer.handle)

    def received(self, message: PictureEncoded | PictureRefused) -> None:
        asked = self._asked
        if asked is not None and asked.message.id == message.id and not asked.answer.done():
            asked.answer.set_result(message)
        elif isinstance(message, PictureEncoded):  # of a visual server that has been lost since
            self._files.remove(message.handle)

    async def lost(self, *, by_itself: bool) -> None:
        """The visual server has ended, and another is started."""
        self._channel.reopen()
        asked = self._asked
        if asked is None or asked.answer.done():
            return
        asked.losses += by_itself
        if asked.losses < MOST_LOSSES:
            await self._send(asked)
        else:
            message = "ended the process that encodes pictures, twice"
            asked.answer.set_result(PictureRefused(asked.message.id, 500, message))

    async def _send(self, asked: _Asked) -> None:
        """Raises ApiError."""
        try:
            await self._channel.send(asked.message)
        except ChannelFull as error:
            raise ApiError(503, "no pictures are taken at the moment", code="overloaded") from error

    def close(self) -> None:
        self._channel.close()
