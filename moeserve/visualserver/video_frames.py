"""Which frames of a video a tower reads, and when they are shown, as Qwen3-VL's processor has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from moeserve.messages.pictures import MOST_FRAMES

LEAST_FRAMES: Final = 4  # chosen from a video; a shorter video has all its frames chosen


class Video(NamedTuple):
    frames: np.ndarray[
        Any, np.dtype[np.uint8]
    ]  # [2 * n, height, width, 3]: two follow one another in each part
    times: tuple[float, ...]  # n: the second at which each part is shown


def chosen_frames(total: int, fps: float, chosen_fps: float, most: int) -> list[int]:
    """Returns the indices of the frames that are read, of a video of `total` frames and `fps` in a second."""
    count = min(max(int(total / fps * chosen_fps), LEAST_FRAMES), most, MOST_FRAMES, total)
    return [int(index) for index in np.linspace(0, total - 1, count).round()]


def in_twos(frames: np.ndarray[Any, np.dtype[np.uint8]], seconds: Sequence[float]) -> Video:
    """Returns the frames, uint8 [frames, height, width, 3], in parts of two, the last frame twice if their number is
    odd. seconds: when each frame is shown; a part is shown halfway between its frames."""
    if len(frames) % 2:
        frames, seconds = np.concatenate([frames, frames[-1:]]), [*seconds, seconds[-1]]
    times = [(first + second) / 2 for first, second in zip(seconds[::2], seconds[1::2], strict=True)]
    return Video(frames, tuple(times))
