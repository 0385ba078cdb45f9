"""Which pictures the visual server gets when clients leave before their pictures are encoded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from moeserve.httpserver.generation.engine.picture_client import EncodedPicture, PictureClient
from moeserve.httpserver.generation.request.pictures import Picture
from moeserve.messages.pictures import EncodePicture, PictureEncoded
from moeserve.processes.embedding_files import EmbeddingFiles

CROWD = 20


class Sent:
    """In the place of the channel to the visual server."""

    def __init__(self) -> None:
        self.pictures: list[EncodePicture] = []

    async def send(self, message: EncodePicture) -> None:
        self.pictures.append(message)

    def reopen(self) -> None:
        pass


@pytest.mark.parametrize("is_lost", [False, True])
def test_pictures_whose_clients_have_left(tmp_path: Path, is_lost: bool) -> None:
    """They are not sent. The picture that the visual server has is waited for, and not sent again to the next one."""
    sent, files = Sent(), EmbeddingFiles(tmp_path / "spans")

    def encoded() -> PictureEncoded:
        return PictureEncoded(sent.pictures[-1].id, 1, 1, bytes(32), files.write(b"rows"), 0.5, False)

    async def run() -> EncodedPicture:
        client = PictureClient(cast(Any, sent), files, cast(Any, None), lambda answer: None)

        def ask(data: bytes) -> asyncio.Task[EncodedPicture]:
            return asyncio.create_task(client.encode(Picture(data), "a tenant", "messages"))

        crowd = [ask(b"abandoned") for _ in range(CROWD)]
        last = ask(b"wanted")
        await settle()
        for task in crowd:
            task.cancel()
        await asyncio.wait(crowd)
        assert len(sent.pictures) == 1
        if is_lost:
            await client.lost(by_itself=True)
        else:
            client.received(encoded())
        await settle()
        assert [picture.data for picture in sent.pictures] == [b"abandoned", b"wanted"]
        client.received(encoded())
        return await last

    picture = asyncio.run(run())
    assert [path.name for path in (tmp_path / "spans").iterdir()] == [picture.parts[0][1]]


async def settle() -> None:
    """Until every task waits: each of them takes a few turns of the loop."""
    for _ in range(10 * CROWD):
        await asyncio.sleep(0)
