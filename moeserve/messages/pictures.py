"""Messages between httpserver and the visual server: a picture, and where its embeddings lie."""

from __future__ import annotations

from typing import Final

import msgspec

MAX_PICTURE_BYTES: Final = 32 << 20  # of a file; a whole request's body has no more
MOST_PICTURES: Final = 64  # of a request


class EncodePicture(msgspec.Struct, frozen=True, tag=True):
    """httpserver -> visual server. Answered by PictureEncoded or PictureRefused, unless the visual server is lost."""

    id: int  # unique while the visual server runs
    data: bytes  # a file, as the client has sent it
    max_tokens: int | None = None  # None: the server's own limit


class PictureEncoded(msgspec.Struct, frozen=True, tag=True):
    """visual server -> httpserver. httpserver removes the files of `parts` (`processes/embedding_files.py`)."""

    id: int
    rows: int  # tokens: the picture has rows x columns of them
    columns: int
    sha256: bytes  # of the embeddings: EmbeddingSpan.sha256
    handle: str
    seconds: float  # taken to decode and encode it
    is_cached: bool  # it was encoded before
    # sha256 and handle of each tile behind the first, of a picture in tiles. The last one is the whole picture, which
    # rows and columns leave out.
    more: tuple[tuple[bytes, str], ...] = ()

    @property
    def parts(self) -> tuple[tuple[bytes, str], ...]:
        """sha256 and handle of each tile; of a picture without tiles its own."""
        return (self.sha256, self.handle), *self.more


class PictureRefused(msgspec.Struct, frozen=True, tag=True):
    """visual server -> httpserver."""

    id: int
    status: int  # of HTTP: 400 where the picture is at fault
    message: str
