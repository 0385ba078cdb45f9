"""Which pictures the visual server gets when clients leave before their pictures are encoded, and when open requests
hold many."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from moeserve.httpserver.generation.engine import picture_client
from moeserve.httpserver.generation.engine.picture_client import EncodedPicture, PictureClient
from moeserve.httpserver.generation.request.pictures import Picture
from moeserve.httpserver.transport.errors import ApiError
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


def test_embeddings_are_bounded_in_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant leaves room for others, and all of them together hold no more than the whole; what ends makes room."""
    monkeypatch.setattr(picture_client, "MOST_HELD_BYTES", 40)
    monkeypatch.setattr(picture_client, "MOST_TENANT_BYTES", 20)
    sent, files = Sent(), EmbeddingFiles(tmp_path / "spans")

    async def run() -> None:
        client = PictureClient(cast(Any, sent), files, cast(Any, None), lambda answer: None)

        async def ask(tenant: str) -> EncodedPicture:
            task = asyncio.create_task(client.encode(Picture(b"1"), tenant, "messages"))
            before = len(sent.pictures)
            await settle()
            if len(sent.pictures) > before:
                more = ((bytes(32), files.write(b"rows")),)  # a second part
                first = files.write(b"row of 8")
                id = sent.pictures[-1].id
                client.received(PictureEncoded(id, 1, 1, bytes(32), first, 0.5, False, more))
            return await task

        async def check_refused(tenant: str) -> None:
            with pytest.raises(ApiError, match="hold too many pictures") as error:
                await ask(tenant)
            assert error.value.status == 503

        first = [await ask("one"), await ask("one")]
        assert [each.num_bytes for each in first] == [12, 12]
        await check_refused("one")
        second = [await ask("two"), await ask("two")]
        await check_refused("three")  # 48 bytes
        second.pop()
        third = await ask("three")
        del third, second
        await check_refused("one")
        first.pop()
        assert (await ask("one")).num_bytes == 12

    asyncio.run(run())
    assert len(sent.pictures) == 6
    assert not [*(tmp_path / "spans").iterdir()]


async def settle() -> None:
    """Until every task waits: each of them takes a few turns of the loop."""
    for _ in range(10 * CROWD):
        await asyncio.sleep(0)
