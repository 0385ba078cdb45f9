"""What the visual server answers to a picture, beside a tower that gives a picture's size."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from moeserve.messages.pictures import (
    EncodePicture,
    PictureEncoded,
    PictureRefused,
    PixelBounds,
    VideoSettings,
)
from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.processes.tower_page import TowerPage
from moeserve.visualserver.embedding_cache import EmbeddingCache, Embeddings
from moeserve.visualserver.encoder import PictureEncoder
from moeserve.visualserver.encoding_pace import EncodingPace
from moeserve.visualserver.media_decoder import PictureError
from moeserve.visualserver.picture_decoder import PictureDecoder
from moeserve.visualserver.picture_size import StretchRule
from moeserve.visualserver.slices import Slices


class SizeTower:
    """Rows of 4 numbers, all of the picture's mean."""

    def __init__(self) -> None:
        self.encoded = 0

    stops_steps = False

    def encode(
        self, pixels: np.ndarray[Any, np.dtype[np.uint8]], slice_ended: Callable[[float], None]
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        slice_ended(0.5)
        self.encoded += 1
        tokens = pixels.shape[0] * pixels.shape[1] // 1024
        return np.full((tokens, 4), pixels.mean(), np.float32)

    def wait(self, behind: int) -> None:
        pass

    def used_s(self) -> float:
        return 0.0


def picture(shade: int, size: tuple[int, int] = (96, 64)) -> bytes:
    file = io.BytesIO()
    Image.new("L", size, shade).save(file, "PNG")
    return file.getvalue()


def rule(message: EncodePicture) -> StretchRule:
    if message.pixels is not None:
        raise PictureError("cannot have them")
    return StretchRule(32, 1024, 1024 * (message.max_tokens or 4096))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[tuple[PictureEncoder, SizeTower, Path]]:
    tower, decoder = SizeTower(), PictureDecoder()
    files = EmbeddingFiles(tmp_path / "spans")
    slices = Slices(EncodingPace(1.0), TowerPage(tmp_path / "tower-page"), tower)
    encoder = PictureEncoder(tower, decoder, rule, EmbeddingCache(1000), files, slices)
    yield encoder, tower, tmp_path / "spans"
    decoder.close()


def test_answers(world: tuple[PictureEncoder, SizeTower, Path]) -> None:
    """The same picture is encoded once, and each answer has a file of its own."""
    encoder, tower, folder = world
    first = encoder.answer(EncodePicture(1, picture(100)))
    again = encoder.answer(EncodePicture(2, picture(100)))
    assert isinstance(first, PictureEncoded)
    assert isinstance(again, PictureEncoded)
    assert (first.rows, first.columns, first.is_cached) == (2, 3, False)
    assert (again.rows, again.columns, again.is_cached, again.sha256) == (2, 3, True, first.sha256)
    assert tower.encoded == 1
    assert first.handle != again.handle
    for one in (first, again):
        data = (folder / one.handle).read_bytes()
        assert sha256(data).digest() == one.sha256
        assert np.frombuffer(data, np.float32).tolist() == [100.0] * 24
    smaller = encoder.answer(EncodePicture(3, picture(100), max_tokens=2))
    assert isinstance(smaller, PictureEncoded)
    assert (smaller.rows * smaller.columns, smaller.is_cached) == (1, False)


def test_what_is_refused(world: tuple[PictureEncoder, SizeTower, Path]) -> None:
    encoder, tower, folder = world
    answer = encoder.answer(EncodePicture(1, b"no picture"))
    assert isinstance(answer, PictureRefused)
    assert (answer.id, answer.status) == (1, 400)
    assert answer.message.startswith("is in no known format")
    answer = encoder.answer(EncodePicture(3, b"a video", video=VideoSettings()))
    assert isinstance(answer, PictureRefused)
    assert (
        answer.message
        == "is a video, and this model's tower reads pictures only; send frames of it as pictures"
    )
    answer = encoder.answer(EncodePicture(4, picture(9), pixels=PixelBounds(1, 2)))
    assert isinstance(answer, PictureRefused)
    assert (answer.status, answer.message) == (400, "cannot have them")
    folder.parent.joinpath("spans").write_text("a file where a folder should be")
    answer = encoder.answer(EncodePicture(2, picture(9)))
    assert isinstance(answer, PictureRefused)
    assert answer.status == 503
    assert tower.encoded == 1


def test_the_cache_keeps_what_was_used_last() -> None:
    cache = EmbeddingCache(100)
    entries = {name: Embeddings(1, 1, bytes(40), name) for name in (b"a", b"b", b"c", b"d")}
    cache.put(b"a", entries[b"a"])
    cache.put(b"b", entries[b"b"])
    assert cache.get(b"a") is entries[b"a"]
    cache.put(b"c", entries[b"c"])
    assert [cache.get(name) is None for name in (b"a", b"b", b"c")] == [False, True, False]
    cache.put(b"e", Embeddings(1, 1, bytes(101), b"e"))
    assert [cache.get(name) for name in (b"a", b"c", b"e")] == [None] * 3
    cache.put(b"d", entries[b"d"])
    assert cache.get(b"d") is entries[b"d"]
