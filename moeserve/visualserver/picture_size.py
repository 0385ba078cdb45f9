"""The size to which a picture is brought before a tower reads it, by the rule of the tower's publisher."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import numpy as np

# The highest ratio of the longer side to the shorter, in the processors of Qwen and GLM.
MOST_ASPECT: Final = 200


class StretchRule(msgspec.Struct, frozen=True, tag=True):
    """Qwen's and GLM's rule. Sides become multiples of `factor` pixels, and the area lies between the two bounds. A
    picture is stretched, not padded."""

    factor: int  # pixels: a token's side
    min_pixels: int
    max_pixels: int
    # GLM's rule: a picture with a side shorter than `factor` is enlarged first, so that the ratio of its sides stays.
    enlarges_sides: bool = False

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Returns the new height and width in pixels. Raises ValueError for a picture that is too narrow."""
        if self.enlarges_sides and min(height, width) < self.factor:
            scale = max(self.factor / height, self.factor / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) > MOST_ASPECT * min(height, width):
            raise ValueError(
                f"a picture's longer side may be at most {MOST_ASPECT} times its shorter side; crop or pad it"
            )
        sides = height, width
        rounded = [
            round(side / self.factor) * self.factor for side in sides
        ]  # rounds halves to even, as Qwen's processor does
        area = rounded[0] * rounded[1]
        if area > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rounded = [
                max(self.factor, math.floor(side / shrink / self.factor) * self.factor) for side in sides
            ]
        elif area < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rounded = [math.ceil(side * grow / self.factor) * self.factor for side in sides]
        return rounded[0], rounded[1]


class FrameRule(msgspec.Struct, frozen=True, tag=True):
    """Qwen3-VL's rule for videos: `StretchRule` for all frames together. The bounds of the area are the video's, and
    are shared among its frames; no frame exceeds `most_frame_pixels`."""

    factor: int  # pixels: a token's side
    min_pixels: int
    max_pixels: int
    most_frame_pixels: int
    num_frames: int = 2

    @property
    def most_frames(self) -> int:
        """Frames of which each can have its least share of the area."""
        return max(2, self.max_pixels // self._least_share)

    @property
    def _least_share(self) -> int:
        """Pixels of a frame that the bound for all frames does not take away. The publisher derives it from the least
        area, though that is the whole video's."""
        return int(self.min_pixels * 1.05)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Returns a frame's new height and width in pixels. Raises ValueError for frames that are too narrow."""
        share = max(min(self.most_frame_pixels, self.max_pixels // self.num_frames), self._least_share)
        # The publisher's bounds are of an even number of frames, the area that it shrinks is of `num_frames`.
        even = round(self.num_frames / 2) * 2
        if min(height, width) < self.factor:
            scale = max(self.factor / height, self.factor / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) > MOST_ASPECT * min(height, width):
            raise ValueError(
                f"a video's longer side may be at most {MOST_ASPECT} times its shorter side; crop or pad it"
            )
        rounded = [round(side / self.factor) * self.factor for side in (height, width)]
        area, max_pixels = even * rounded[0] * rounded[1], share * self.num_frames
        if area > max_pixels:
            shrink = math.sqrt(self.num_frames * height * width / max_pixels)
            rounded = [
                max(self.factor, math.floor(side / shrink / self.factor) * self.factor)
                for side in (height, width)
            ]
        elif area < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (self.num_frames * height * width))
            rounded = [math.ceil(side * grow / self.factor) * self.factor for side in (height, width)]
        return rounded[0], rounded[1]


class LargestRule(msgspec.Struct, frozen=True, tag=True):
    """Gemma 4's rule. A picture is shrunk or enlarged to the area of `max_tokens` tokens, and its sides are rounded
    down to multiples of `factor` pixels."""

    factor: int  # pixels: a token's side
    max_tokens: int
    max_side: int  # tokens

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width in pixels."""
        scale = math.sqrt(self.max_tokens * self.factor**2 / (height * width))
        rows, columns = (math.floor(scale * side / self.factor) for side in (height, width))
        # A narrow picture becomes one row or column of tokens, whose number follows from the ratio of the sides.
        if rows == 0:
            rows, columns = 1, min(width // height, self.max_tokens)
        elif columns == 0:
            rows, columns = min(height // width, self.max_tokens), 1
        rows, columns = min(rows, self.max_side), min(columns, self.max_side)
        return rows * self.factor, columns * self.factor


class PadRule(msgspec.Struct, frozen=True, tag=True):
    """Kimi-K2.5's rule. A picture of more than `max_patches` patches, or with a side of more than `max_side` patches,
    is shrunk. Black pixels added on the right and below make its sides multiples of `factor`."""

    factor: int  # pixels: a token's side
    patch: int  # pixels a side
    max_patches: int
    max_side: int  # patches

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Returns height and width in pixels, including the added pixels."""
        rows, columns = (-(-side // self.factor) * self.factor for side in self.drawn(height, width))
        return rows, columns

    def drawn(self, height: int, width: int) -> tuple[int, int]:
        """Returns height and width in pixels of the picture without the added pixels."""
        patches = max(1, height // self.patch) * max(1, width // self.patch)
        longest = self.max_side * self.patch
        scale = min(1.0, math.sqrt(self.max_patches / patches), longest / height, longest / width)
        rows, columns = (min(max(1, int(side * scale)), longest) for side in (height, width))
        return rows, columns


class TileRule(msgspec.Struct, frozen=True, tag=True):
    """Llama 4's rule. A picture is shrunk, or enlarged to at most a tile's side, onto a canvas of square tiles. The
    canvas is the one that shrinks the picture least and, of several such, the smallest. If there are several tiles, the
    whole picture is one more tile, which lies below the others on the left."""

    factor: int  # pixels: a token's side
    tile: int  # pixels a side
    max_tiles: int

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Returns the rows and columns of tiles."""
        found = list(self._grids())
        # float32, as the publisher compares them.
        sides = np.array(found, np.float32) * self.tile / np.array([height, width], np.float32)
        scales = sides.min(1)
        enlarging = scales[scales >= 1]
        best = enlarging.min() if len(enlarging) else scales.max()
        return min((found[at] for at in np.flatnonzero(scales == best)), key=math.prod)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Returns height and width in pixels of all tiles together, see `tiles_of`."""
        rows, columns = self.grid(height, width)
        return (rows + (rows * columns > 1)) * self.tile, columns * self.tile

    def drawn(self, height: int, width: int) -> tuple[int, int]:
        """Returns height and width in pixels of the picture on the canvas."""
        rows, columns = (
            min(max(side, self.tile), count * self.tile)
            for side, count in zip((height, width), self.grid(height, width), strict=True)
        )
        if columns / width < rows / height:
            return max(1, min(math.floor(height * (columns / width)), rows)), columns
        return rows, max(1, min(math.floor(width * (rows / height)), columns))

    def _grids(self) -> Iterator[tuple[int, int]]:
        """Returns all pairs of rows and columns in the publisher's order: by their ratio; of pairs with one ratio, the
        one with the most tiles first."""
        ratios: dict[float, list[tuple[int, int]]] = {}
        for count in range(self.max_tiles, 0, -1):
            for rows in range(1, count + 1):
                if count % rows == 0:
                    ratios.setdefault(rows / (count // rows), []).append((rows, count // rows))
        for grids in ratios.values():
            yield from grids


class SquareRule(msgspec.Struct, frozen=True, tag=True):
    """Gemma 3's rule. A picture is stretched to a square."""

    factor: int  # pixels: a token's side
    side: int  # pixels

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.side, self.side


def tiles_of(pixels: Any, side: int) -> list[Any]:
    """Returns the tiles of a picture that has the size of `TileRule.resized`, row by row, and the whole picture's tile
    last. pixels: an array or tensor [height, width, 3]."""
    height, width = pixels.shape[:2]
    if height == side:
        return [pixels]
    starts = ((row, column) for row in range(0, height - side, side) for column in range(0, width, side))
    return [pixels[row : row + side, column : column + side] for row, column in (*starts, (height - side, 0))]


SizeRule = StretchRule | FrameRule | LargestRule | PadRule | TileRule | SquareRule
