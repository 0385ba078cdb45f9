"""Kimi-K2.5's pictures: the tower's embeddings and the text model's logits beside transformers', and the processor."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from moeserve.errors import ConfigError
from moeserve.models.errors import ModelError
from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.visualserver.decode_process import _resized
from moeserve.visualserver.picture_size import PadRule
from moeserve.visualserver.tower_file import open_tower
from moeserve.visualserver.towers.load import make_tower
from moeserve.worker.loading.cpu.load import build_cpu_runner
from tests.support.models.transformers_source import function_of
from tests.support.pictures.kimi_model import IMAGE, PATCH, write_model
from tests.support.pictures.span_steps import distance, span_logits, span_of
from tests.support.worker.served_answers import load

ROWS, COLUMNS = 3, 5  # tokens: more columns than the learned positions have, so that these are resampled
PIXELS = np.random.default_rng(2).integers(0, 256, (ROWS * 8, COLUMNS * 8, 3), dtype=np.uint8)
TOKENS = [50, 60, 70, 80, 90, *[IMAGE] * ROWS * COLUMNS, 91, *range(100, 112)]
FIRST = TOKENS.index(IMAGE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("kimi") / "tiny"
    return write_model(folder), folder


def theirs() -> dict[str, Any]:
    """The picture as transformers' processor gives it."""
    scaled = (torch.from_numpy(PIXELS) / 255 - torch.tensor([0.5, 0.4, 0.3])) / torch.tensor([0.5, 0.6, 0.7])
    rows, columns = PIXELS.shape[0] // PATCH, PIXELS.shape[1] // PATCH
    patches = scaled.view(rows, PATCH, columns, PATCH, 3).permute(0, 2, 4, 1, 3)
    return {
        "pixel_values": patches.reshape(-1, 3, PATCH, PATCH),
        "image_grid_thw": torch.tensor([[1, rows, columns]]),
    }


def test_the_tower_and_the_logits_behind_a_picture(model: tuple[Any, Path], tmp_path: Path) -> None:
    """From the folder and from the mmproj file the same bits; whole and with a chunk's border in the picture, too."""
    made, folder = model
    with torch.no_grad():
        truth = made.model.get_image_features(**theirs(), return_dict=True).pooler_output[0].numpy()
        expected = made(input_ids=torch.tensor([TOKENS]), **theirs()).logits[0].numpy()
    rows = make_tower(*open_tower(folder)).encode(PIXELS)
    assert rows.shape == truth.shape == (ROWS * COLUMNS, 128)
    assert np.linalg.norm(rows - truth) < 1e-5 * np.linalg.norm(truth)
    assert np.array_equal(make_tower(*open_tower(folder.with_name("mmproj.gguf"))).encode(PIXELS), rows)

    files = EmbeddingFiles(tmp_path / "spans")
    runner = build_cpu_runner(load(folder), files)
    _, shape = open_tower(folder)
    assert shape.embedding_size == runner.ready().embedding_size
    whole = span_logits(runner, TOKENS, [span_of(files, FIRST, rows)], 64)
    assert distance(expected, whole) < 1e-4
    assert np.array_equal(span_logits(runner, TOKENS, [span_of(files, FIRST, rows)], 7), whole)
    turned = span_of(files, FIRST, np.ascontiguousarray(rows[::-1]))
    assert distance(expected, span_logits(runner, TOKENS, [turned], 64)) > 1e-2


def test_sizes_are_the_processor_s() -> None:
    """200 pictures, at the publisher's bounds and at lower ones."""
    navit_resize = function_of("kimi_k25/image_processing_kimi_k25.py", "navit_resize")
    rng = random.Random(5)
    for number in range(200):
        most = rng.choice((60, 6000)) if number % 4 else 20000
        height, width = rng.randrange(1, most), rng.randrange(1, most)
        limit = rng.choice((16384, 1024, 64))
        drawn, padded = navit_resize(height, width, 14, 2, limit, 512)
        rule = PadRule(28, 14, limit, 512)
        assert (rule.drawn(height, width), rule.resized(height, width)) == (drawn, padded), (height, width)


def test_what_a_picture_lacks_is_black() -> None:
    picture = Image.new("RGB", (30, 57), "white")
    pixels = _resized(picture, PadRule(28, 14, 16384, 512))
    assert pixels.shape == (84, 56, 3)
    assert pixels[:57, :30].min() == 255
    assert pixels[57:].max() == pixels[:, 30:].max() == 0
    small = _resized(picture, PadRule(28, 14, 4, 512))  # shrunk to four patches, about
    assert small.shape == (56, 28, 3)
    assert small[40:].max() == 0


def test_bounds_in_tokens(model: tuple[Any, Path]) -> None:
    _, shape = open_tower(model[1])
    assert shape.size_rule(None, None) == PadRule(8, 4, 16384, 512)
    assert shape.size_rule(None, 256) == PadRule(8, 4, 1024, 512)
    with pytest.raises(ConfigError, match="--image-min-tokens: Kimi's pictures are shrunk"):
        shape.size_rule(8, None)


def test_files_that_are_no_tower(model: tuple[Any, Path], tmp_path: Path) -> None:
    whole = model[1].with_name("mmproj.gguf").read_bytes()
    path = tmp_path / "mmproj.gguf"
    for old, new, words in (
        (b"kimik25", b"kimivl2", "has the projector 'kimivl2'"),
        (b"mm.input_norm.bias", b"mm.input_norm.bios", "mm.input_norm.bias is missing"),
        (b"v.position_embd.weight", b"v.position_embt.weight", "v.position_embd.weight is not a table"),
        (b"clip.vision.image_std", b"clip.vision.image_stt", "image_std"),
    ):
        assert old in whole
        path.write_bytes(whole.replace(old, new))
        with pytest.raises(ModelError, match=words):
            open_tower(path)
