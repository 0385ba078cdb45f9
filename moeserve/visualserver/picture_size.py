"""To what size a picture is brought before a tower of Qwen's reads it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

MOST_ASPECT: Final = 200  # of the longer side to the shorter


@dataclass(frozen=True, slots=True)
class SizeRule:
    """Sides become multiples of `factor` pixels, and the area lies between the two bounds; the picture is stretched,
    not padded."""

    factor: int  # pixels: a token's side
    min_pixels: int
    max_pixels: int

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width in pixels. Raises ValueError for a picture that is too narrow."""
        if max(height, width) > MOST_ASPECT * min(height, width):
            raise ValueError(f"a picture's longer side is at most {MOST_ASPECT} times the shorter")
        sides = height, width
        rounded = [
            round(side / self.factor) * self.factor for side in sides
        ]  # halves to even, as Qwen's processor
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
