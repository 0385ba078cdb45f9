"""Video files whose frames are told apart by their brightness."""

from __future__ import annotations

import io
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

av: Any = pytest.importorskip("av")  # an extra: moeserve[video]


def video_file(
    shades: Iterable[int],
    *,
    fps: int | Fraction = 10,
    size: tuple[int, int] = (96, 160),
    codec: str = "mpeg4",
    container: str = "mp4",
    **options: str,
) -> bytes:
    """Returns a file whose frames are grey. shades: of each frame, 0 to 255. size: height and width in pixels.
    options: the container's."""
    file = io.BytesIO()
    with av.open(file, "w", format=container, options=options) as made:
        stream = made.add_stream(codec, rate=fps)
        stream.height, stream.width = size
        stream.pix_fmt = "yuv420p"
        for shade in shades:
            frame = np.full((*size, 3), shade, np.uint8)
            made.mux(stream.encode(av.VideoFrame.from_ndarray(frame)))
        made.mux(stream.encode())
    return file.getvalue()
