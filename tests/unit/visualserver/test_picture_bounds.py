"""The bounds of a picture's size: a request narrows the server's."""

from __future__ import annotations

import pytest

from moeserve.messages.pictures import EncodePicture, PixelBounds
from moeserve.visualserver.media_decoder import PictureError
from moeserve.visualserver.picture_bounds import PictureBounds
from moeserve.visualserver.picture_size import StretchRule
from moeserve.visualserver.shapes.gemma3 import Gemma3Shape
from moeserve.visualserver.shapes.shape import PixelScale
from tests.support.pictures.random_tower import QWEN36

AREA = 32 * 32  # a token's pixels
GEMMA3 = Gemma3Shape(
    hidden=1152, heads=16, layers=27, ffn=4304, patch=14, merge=4, output=2560, side=896, eps=1e-6,
    pixels=PixelScale((0.5,) * 3, (0.5,) * 3), is_swapped=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("server", "max_tokens", "pixels", "expected"),
    [
        ((None, None), None, None, (8, 4096)),
        ((None, None), 256, None, (8, 256)),
        ((None, None), None, (None, 100 * AREA + 5), (8, 100)),
        ((None, None), None, (None, 1), (1, 1)),
        ((None, None), None, (None, 10**9), (8, 4096)),  # no wider than the server's
        ((None, None), None, (64 * AREA - 5, None), (64, 4096)),
        ((None, None), None, (10**9, None), (4096, 4096)),
        ((None, None), None, (64 * AREA, 128 * AREA), (64, 128)),
        ((16, 1024), None, (AREA, 8192 * AREA), (16, 1024)),
        ((16, 1024), 256, (AREA, 512 * AREA), (16, 256)),
        ((64, None), None, (None, 32 * AREA), (32, 32)),
    ],
)
def test_bounds(
    server: tuple[int | None, int | None],
    max_tokens: int | None,
    pixels: tuple[int | None, int | None] | None,
    expected: tuple[int, int],
) -> None:
    """expected: tokens."""
    given = None if pixels is None else PixelBounds(*pixels)
    rule = PictureBounds(QWEN36, *server).rule(EncodePicture(1, b"", max_tokens, pixels=given))
    assert isinstance(rule, StretchRule)
    assert (rule.min_pixels, rule.max_pixels) == (expected[0] * AREA, expected[1] * AREA)


@pytest.mark.parametrize("pixels", [PixelBounds(1, None), PixelBounds(None, 1)])
def test_a_tower_with_pictures_of_one_size(pixels: PixelBounds) -> None:
    bounds = PictureBounds(GEMMA3, None, None)
    bounds.rule(EncodePicture(1, b"", 256))
    with pytest.raises(PictureError, match=r"min_pixels or max_pixels .* always has 256 tokens"):
        bounds.rule(EncodePicture(1, b"", pixels=pixels))
