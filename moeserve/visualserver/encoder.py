"""Turns a picture or a video, as the client sent it, into the files of its embeddings."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from hashlib import sha256
from typing import Any, Protocol

import numpy as np

from moeserve.errors import UserError
from moeserve.messages.pictures import EncodePicture, PictureEncoded, PictureRefused
from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.visualserver.embedding_cache import EmbeddingCache, Embeddings
from moeserve.visualserver.media_decoder import PictureError
from moeserve.visualserver.picture_decoder import PictureDecoder
from moeserve.visualserver.picture_size import FrameRule, SizeRule, TileRule, tiles_of
from moeserve.visualserver.slices import Slices
from moeserve.visualserver.video_decoder import VideoDecoder

log = logging.getLogger(__name__)

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


class Tower(Protocol):
    def encode(
        self, pixels: Pixels, slice_ended: Callable[[float], None]
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Returns the embeddings of a picture, float32 [tokens, width]. slice_ended: called between parts of the work,
        during which the device may be used otherwise. See `towers.tower.Tower.encode`."""
        ...


class PictureEncoder:
    """Encodes one picture or video at a time: decodes it, runs the tower, and stores the embeddings. Only the
    encoding thread calls it."""

    def __init__(
        self,
        tower: Tower,
        decoder: PictureDecoder,
        rule: Callable[[EncodePicture], SizeRule],
        cache: EmbeddingCache,
        files: EmbeddingFiles,
        slices: Slices,
        videos: tuple[VideoDecoder, FrameRule] | None = None,
    ) -> None:
        """rule: returns the rule for a picture's size, or raises PictureError. videos: None if the tower reads none."""
        self._tower = tower
        self._decoder = decoder
        self._rule = rule
        self._cache = cache
        self._files = files
        self._slices = slices
        self._videos = videos

    def answer(self, picture: EncodePicture) -> PictureEncoded | PictureRefused:
        began = time.monotonic()
        try:
            rule = self._rule(picture)
            key = _key(picture, rule)
            found = self._cache.get(key)
            is_cached = found is not None
            if found is None:
                found = self._encode(picture.data, rule) if picture.video is None else self._watch(picture)
                self._cache.put(key, found)
            handle, *handles = [self._files.write(part) for part in found.parts]
        except PictureError as error:
            return PictureRefused(picture.id, 400, str(error))
        except UserError as error:
            return PictureRefused(picture.id, 503, f"cannot be encoded: {error}")
        except OSError as error:
            log.error("the embeddings of a picture cannot be written: %s", error)
            return PictureRefused(picture.id, 503, f"cannot be encoded: {error.strerror}")
        seconds = time.monotonic() - began
        more = tuple(
            (sha256(part).digest(), name) for part, name in zip(found.parts[1:], handles, strict=True)
        )
        sizes = found.rows, found.columns
        return PictureEncoded(picture.id, *sizes, found.sha256, handle, seconds, is_cached, more, found.times)

    def _encode(self, data: bytes, rule: SizeRule) -> Embeddings:
        pixels = self._decoder.decode(data, rule)
        with self._slices.picture():
            rows = self._tower.encode(pixels, self._slices.ended).tobytes()
        height, width = pixels.shape[:2]
        if not isinstance(rule, TileRule):
            return Embeddings(height // rule.factor, width // rule.factor, rows, sha256(rows).digest())
        tiles = len(tiles_of(pixels, rule.tile))
        first = sha256(memoryview(rows)[: len(rows) // tiles]).digest()
        below = rule.tile if tiles > 1 else 0  # rows of pixels of the whole picture, which is the last tile
        return Embeddings((height - below) // rule.factor, width // rule.factor, rows, first, tiles)

    def _watch(self, picture: EncodePicture) -> Embeddings:
        """Encodes a video, each two frames of it like a picture."""
        if self._videos is None:
            raise PictureError(
                "is a video, and this model's tower reads pictures only; send frames of it as pictures"
            )
        decoder, rule = self._videos
        video = decoder.decode(picture, rule)
        parts = []
        for two in video.frames.reshape(-1, 2, *video.frames.shape[1:]):
            with self._slices.picture():
                parts.append(self._tower.encode(two, self._slices.ended).tobytes())
        rows, columns = (side // rule.factor for side in video.frames.shape[1:3])
        first = sha256(parts[0]).digest()
        return Embeddings(rows, columns, b"".join(parts), first, len(parts), video.times)


def _key(picture: EncodePicture, rule: SizeRule) -> bytes:
    """Returns the cache's key. The lengths keep lists of frames apart whose bytes are the same together."""
    what = (rule, picture.video, *map(len, picture.frames))
    return sha256(b"".join((f"{what}".encode(), picture.data, *picture.frames))).digest()
