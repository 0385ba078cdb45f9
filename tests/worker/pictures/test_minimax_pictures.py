"""MiniMax-M3's pictures: the tower's embeddings and the text model's logits beside transformers', and the processor."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moeserve.models.errors import ModelError
from moeserve.models.open import open_metadata
from moeserve.models.registry import read_checked_shape
from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.visualserver.picture_size import StretchRule
from moeserve.visualserver.tower_file import open_tower
from moeserve.visualserver.towers.load import make_tower
from moeserve.worker.loading.cpu.load import build_cpu_runner
from tests.support.models.transformers_source import function_of
from tests.support.pictures.minimax_model import DEVIATION, IMAGE, MEAN, MERGE, PATCH, write_model
from tests.support.pictures.picture_patches import processed
from tests.support.pictures.span_steps import distance, span_logits, span_of
from tests.support.worker.served_answers import load

ROWS, COLUMNS = 2, 4  # tokens
PIXELS = np.random.default_rng(2).integers(0, 256, (ROWS * 8, COLUMNS * 8, 3), dtype=np.uint8)
TOKENS = [50, 60, 70, 80, 90, *[IMAGE] * ROWS * COLUMNS, 91, *range(100, 115)]
FIRST = TOKENS.index(IMAGE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("minimax") / "tiny"
    return write_model(folder), folder


def theirs() -> dict[str, Any]:
    """The picture as transformers' processor gives it."""
    return processed(PIXELS, MEAN, DEVIATION, PATCH, MERGE)


def test_the_tower_and_the_logits_behind_a_picture(model: tuple[Any, Path], tmp_path: Path) -> None:
    """From the folder and from the mmproj file the same bits; whole and with a chunk's border in the picture, too."""
    made, folder = model
    with torch.no_grad():
        found = made.model.get_image_features(**theirs(), return_dict=True).pooler_output
        truth = torch.cat(list(found)).numpy()
        expected = made(input_ids=torch.tensor([TOKENS]), **theirs()).logits[0].numpy()
    rows = make_tower(*open_tower(folder)).encode(PIXELS)
    assert rows.shape == truth.shape == (ROWS * COLUMNS, 128)
    assert np.linalg.norm(rows - truth) < 1e-5 * np.linalg.norm(truth)
    assert np.array_equal(make_tower(*open_tower(folder.with_name("mmproj.gguf"))).encode(PIXELS), rows)
    assert open_tower(folder)[1].fits(read_checked_shape(open_metadata(folder)))

    files = EmbeddingFiles(tmp_path / "spans")
    runner = build_cpu_runner(load(folder), files)
    whole = span_logits(runner, TOKENS, [span_of(files, FIRST, rows)], 64)
    assert distance(expected, whole) < 1e-4
    assert np.array_equal(span_logits(runner, TOKENS, [span_of(files, FIRST, rows)], 7), whole)
    turned = span_of(files, FIRST, np.ascontiguousarray(rows[::-1]))
    assert distance(expected, span_logits(runner, TOKENS, [turned], 64)) > 1e-3


def test_sizes_are_the_processor_s(model: tuple[Any, Path]) -> None:
    """200 pictures, with the publisher's bounds and others."""
    smart_resize = function_of("minimax_m3_vl/image_processing_minimax_m3_vl.py", "smart_resize")
    rng, compared = random.Random(5), 0
    while compared < 200:
        most = rng.choice((40, 200, 6000))
        height, width = rng.randrange(1, most), rng.randrange(1, most)
        if max(height, width) <= 200 * min(height, width):
            longest = rng.choice((451584, 4096 * 784))
            expected = smart_resize(height, width, 28, 4 * 784, longest)
            assert StretchRule(28, 4 * 784, longest).resized(height, width) == expected, (height, width)
            compared += 1
    assert open_tower(model[1])[1].size_rule(None, None) == StretchRule(8, 4 * 64, 576 * 64)


def test_files_that_are_no_tower(model: tuple[Any, Path], tmp_path: Path) -> None:
    whole = model[1].with_name("mmproj.gguf").read_bytes()
    path = tmp_path / "mmproj.gguf"
    for old, new, words in (
        (b"mm.merger.fc1.bias", b"mm.merger.fc1.bios", "mm.merger.fc1.bias is missing"),
        (b"mm.1.weight", b"mm.1.weighs", "mm.1.weight is not a matrix"),
        (b"block_count", b"block_coumt", "block_count"),
    ):
        assert old in whole
        path.write_bytes(whole.replace(old, new))
        with pytest.raises(ModelError, match=words):
            open_tower(path)
