"""Pictures for `--dataset-name random-mm`: random pixels in JPEG files, as in `vllm bench serve`."""

from __future__ import annotations

import argparse
import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from moeserve.cli.workload.options import whole
from moeserve.cli.workload.shapes import WITH_PICTURES
from moeserve.cli.workload.trace import Workload
from moeserve.errors import ConfigError
from moeserve.messages.pictures import MOST_PICTURES

MOST_PIXELS: Final = 16384  # the longest side of a picture
DEFAULT_SIZE: Final = (256, 256)
_PICTURE: Final = 2  # the purpose of a random stream; see `workload/prompts.py`

PictureUrls = Mapping[tuple[int, int], list[str]]  # data: URLs by session and turn


@dataclass(frozen=True, slots=True)
class PictureShape:
    per_request: int
    width: int  # pixels
    height: int

    def __str__(self) -> str:
        return (
            f"{self.per_request} picture{'s' if self.per_request > 1 else ''} of {self.width}x{self.height}"
        )


def add_picture_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(f"pictures (--dataset-name {WITH_PICTURES})")
    group.add_argument(
        "--random-mm-base-items-per-request",
        type=whole(1, MOST_PICTURES),
        metavar="N",
        help="pictures of each request (default: 1)",
    )
    group.add_argument(
        "--random-mm-image-size",
        type=_size,
        metavar="WIDTHxHEIGHT",
        help="size of each picture in pixels (default: 256x256)",
    )


def _size(text: str) -> tuple[int, int]:
    sides = [int(side) if side.isdecimal() else 0 for side in text.split("x")]
    if len(sides) != 2 or not all(1 <= side <= MOST_PIXELS for side in sides):
        raise argparse.ArgumentTypeError(
            f"must be WIDTHxHEIGHT, each between 1 and {MOST_PIXELS}, not {text!r}"
        )
    return sides[0], sides[1]


def pictures_from(args: argparse.Namespace) -> PictureShape | None:
    """Returns None if requests have no pictures. Raises ConfigError if these flags do not go together with pictures."""
    count, size = args.random_mm_base_items_per_request, args.random_mm_image_size
    if args.dataset_name != WITH_PICTURES:
        for flag, value in (("base-items-per-request", count), ("image-size", size)):
            if value is not None:
                raise ConfigError(
                    f"--random-mm-{flag} has no effect without --dataset-name {WITH_PICTURES}; add that, or leave this "
                    "out"
                )
        return None
    if args.backend != "openai-chat":
        raise ConfigError(
            f"--dataset-name {WITH_PICTURES} needs --backend openai-chat: completions have no pictures"
        )
    if args.save_trace is not None:
        raise ConfigError("--save-trace: a trace has no pictures; leave it out")
    if args.against_engine is not None:
        raise ConfigError("--against-engine: the engine alone encodes no pictures; leave it out")
    return PictureShape(count or 1, *(size or DEFAULT_SIZE))


def picture_urls(shape: PictureShape | None, workload: Workload) -> PictureUrls:
    """Makes the pictures of all requests, before the clock starts. The same seed gives the same pictures."""
    if shape is None:
        return {}
    return {
        (number, turn): [
            _url(shape, (workload.seed, _PICTURE, number, turn, at)) for at in range(shape.per_request)
        ]
        for number, session in enumerate(workload.sessions)
        for turn in range(len(session.turns))
    }


def _url(shape: PictureShape, stream: tuple[int, ...]) -> str:
    from PIL import Image  # imported only if there are pictures

    pixels: np.ndarray[Any, np.dtype[np.uint8]] = np.random.default_rng(stream).integers(
        0, 256, (shape.height, shape.width, 3), np.uint8
    )
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
