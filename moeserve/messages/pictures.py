"""Messages between httpserver and the visual server: a picture or a video, and the files of its embeddings."""

from __future__ import annotations

from typing import Final

import msgspec

MAX_PICTURE_BYTES: Final = 32 << 20  # of a file; a whole request's body has no more
MOST_PICTURES: Final = 64  # of a request; a video counts as one
# Frames of a video that a model reads, and frames of a second, unless the client says less or more: Qwen's own.
MOST_FRAMES: Final = 768
DEFAULT_FPS: Final = 2.0


class VideoSettings(msgspec.Struct, frozen=True, array_like=True):
    """The settings by which frames are chosen from a video. If the video is a list of frames, all are used, and `fps`
    says how many of them make a second."""

    fps: float = DEFAULT_FPS
    max_frames: int = MOST_FRAMES


class PixelBounds(msgspec.Struct, frozen=True, array_like=True):
    """The pixels of a resized picture that the client allows, as Qwen's messages have them; None: the server's own."""

    min_pixels: int | None = None
    max_pixels: int | None = None


class EncodePicture(msgspec.Struct, frozen=True, tag=True):
    """httpserver -> visual server. Answered by PictureEncoded or PictureRefused, unless the visual server is lost."""

    id: int  # unique while the visual server runs
    data: bytes  # a file, as the client has sent it; empty with `frames`
    max_tokens: int | None = None  # None: the server's own limit
    video: VideoSettings | None = None  # None: it is a picture
    frames: tuple[bytes, ...] = ()  # the picture files of a video that is a list of pictures
    pixels: PixelBounds | None = None


class PictureEncoded(msgspec.Struct, frozen=True, tag=True):
    """visual server -> httpserver. httpserver removes the files of `parts` (`processes/embedding_files.py`)."""

    id: int
    rows: int  # tokens: the picture has rows x columns of them
    columns: int
    sha256: bytes  # of the embeddings: EmbeddingSpan.sha256
    handle: str
    seconds: float  # taken to decode and encode it
    is_cached: bool  # it was encoded before
    # sha256 and handle of each part after the first. Parts are a picture's tiles, the last one being the whole picture,
    # which `rows` and `columns` do not count; or pairs of a video's frames.
    more: tuple[tuple[bytes, str], ...] = ()
    times: tuple[float, ...] = ()  # of a video: the second at which each part is shown

    @property
    def parts(self) -> tuple[tuple[bytes, str], ...]:
        """Returns the sha256 and the handle of each tile or pair of frames; a picture without tiles is one part."""
        return (self.sha256, self.handle), *self.more


class PictureRefused(msgspec.Struct, frozen=True, tag=True):
    """visual server -> httpserver. The picture cannot be encoded; the client gets this error."""

    id: int
    status: int  # of HTTP: 400 where the picture is at fault
    message: str
