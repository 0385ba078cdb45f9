"""The pictures of `bench serve --dataset-name random-mm`, and the options that do not go with them."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image

from moeserve.cli.bench.pictures import PictureShape, picture_urls
from moeserve.cli.bench.serve import main
from moeserve.cli.simulate.command import main as simulate
from moeserve.cli.workload.shapes import WITH_PICTURES, WorkloadShape, generate

CHAT, MM = ["--backend", "openai-chat"], ["--dataset-name", WITH_PICTURES]


def urls(seed: int) -> list[list[str]]:
    workload = generate(WorkloadShape(num_turns=2), 3, 1.0, 1.0, seed)
    found = picture_urls(PictureShape(2, 40, 24), workload)
    assert list(found) == [(0, 0), (0, 1), (1, 0)]
    return list(found.values())


def test_each_picture_is_another_and_the_seeds_own() -> None:
    first = urls(1)
    assert first == urls(1)
    every = {url for request in first + urls(2) for url in request}
    assert len(every) == 2 * 3 * 2
    for url in every:
        kind, _, data = url.partition(",")
        assert kind == "data:image/jpeg;base64"
        with Image.open(io.BytesIO(base64.b64decode(data, validate=True))) as picture:
            assert (picture.format, picture.size, picture.mode) == ("JPEG", (40, 24), "RGB")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (MM, "needs --backend openai-chat"),
        ([*CHAT, "--random-mm-image-size", "9x9"], "--random-mm-image-size has no effect without"),
        ([*CHAT, "--random-mm-base-items-per-request", "2"], "request has no effect without"),
        ([*CHAT, *MM, "--save-trace", "file"], "a trace has no pictures"),
        ([*CHAT, *MM, "--against-engine", "--model m"], "the engine alone encodes no pictures"),
        ([*CHAT, *MM, "--random-mm-image-size", "640"], "must be WIDTHxHEIGHT"),
        ([*CHAT, *MM, "--random-mm-image-size", "0x9"], "must be WIDTHxHEIGHT"),
        ([*CHAT, *MM, "--random-mm-image-size", "9x20000"], "between 1 and 16384"),
        ([*CHAT, *MM, "--random-mm-base-items-per-request", "65"], "between 1 and 64"),
    ],
)
def test_what_does_not_go_together(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert words in capsys.readouterr().err


def test_pictures_are_not_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        simulate(["--max-total-tokens", "4096", *MM])
    assert "pictures are not simulated" in capsys.readouterr().err
