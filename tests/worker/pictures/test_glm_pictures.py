"""GLM-4.6V's pictures: the tower's embeddings and the text model's logits beside transformers', and the processor."""

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
from tests.support.pictures.glm_model import DEVIATION, END, IMAGE, MEAN, MERGE, PATCH, START, write_model
from tests.support.pictures.picture_fixture import TOWER
from tests.support.pictures.picture_patches import processed
from tests.support.pictures.span_steps import distance, positions_in_sections, span_logits, span_of
from tests.support.worker.served_answers import load

ROWS, COLUMNS = 2, 4  # tokens: more columns than the learned positions have, so that these are resampled
PIXELS = np.random.default_rng(2).integers(0, 256, (ROWS * 8, COLUMNS * 8, 3), dtype=np.uint8)
TOKENS = [50, 60, 70, 80, START, *[IMAGE] * ROWS * COLUMNS, END, *range(100, 115)]
FIRST = TOKENS.index(IMAGE)


@pytest.fixture(scope="module", params=[True, False], ids=["GLM-4.6V", "GLM-4.1V"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("glm") / "tiny"
    return write_model(folder, has_experts=request.param), folder


def theirs() -> dict[str, Any]:
    """The picture as transformers' processor gives it."""
    return processed(PIXELS, MEAN, DEVIATION, PATCH, MERGE)


def test_the_tower_and_the_logits_behind_a_picture(model: tuple[Any, Path], tmp_path: Path) -> None:
    """From the folder and from the mmproj file the same bits; whole and with a chunk's border in the picture, too."""
    made, folder = model
    kinds = torch.tensor([[int(token == IMAGE) for token in TOKENS]])
    with torch.no_grad():
        truth = torch.cat(
            list(made.model.get_image_features(**theirs(), return_dict=True).pooler_output)
        ).numpy()
        expected = (
            made(input_ids=torch.tensor([TOKENS]), mm_token_type_ids=kinds, **theirs()).logits[0].numpy()
        )
    rows = make_tower(*open_tower(folder)).encode(PIXELS)
    assert rows.shape == truth.shape == (ROWS * COLUMNS, 128)
    assert np.linalg.norm(rows - truth) < 1e-5 * np.linalg.norm(truth)
    assert np.array_equal(make_tower(*open_tower(folder.with_name("mmproj.gguf"))).encode(PIXELS), rows)

    files = EmbeddingFiles(tmp_path / "spans")
    runner = build_cpu_runner(load(folder), files)
    assert runner.ready().rotates_in_sections
    span = span_of(files, FIRST, rows, positions_in_sections(FIRST, ROWS, COLUMNS))
    whole = span_logits(runner, TOKENS, [span], 64)
    assert distance(expected, whole) < 1e-4
    assert np.array_equal(span_logits(runner, TOKENS, [span], 7), whole)
    # In other sections the same rows and the text behind them are far off.
    tall = span_of(files, FIRST, rows, positions_in_sections(FIRST, COLUMNS, ROWS))
    assert distance(expected, span_logits(runner, TOKENS, [tall], 64)) > 1e-3


def test_the_sections_lie_one_behind_another(model: tuple[Any, Path]) -> None:
    """Qwen's tower, whose text interleaves its sections, is refused, and so is GLM's for Qwen."""
    text = read_checked_shape(open_metadata(model[1]))
    assert (text.rope_sections, text.sections_in_blocks) == ((4, 6, 6), True)
    assert open_tower(model[1])[1].fits(text)
    assert not open_tower(TOWER)[1].fits(text)


def test_sizes_are_the_processor_s(model: tuple[Any, Path]) -> None:
    """200 pictures, with the publisher's bounds, which count a still picture's two frames, and lower ones."""
    smart_resize = function_of("glm46v/image_processing_pil_glm46v.py", "smart_resize")
    rng, compared = random.Random(5), 0
    while compared < 200:
        most = rng.choice((40, 200, 6000))
        height, width = rng.randrange(1, most), rng.randrange(1, most)
        longest = rng.choice((28 * 28 * 15000, 9633792, 2 * 784 * 256))
        rule = StretchRule(28, 112 * 112 // 2, longest // 2, enlarges_sides=True)
        if max(height, width) <= 150 * min(height, width):
            expected = smart_resize(2, height, width, 2, 28, 112 * 112, longest)
            assert rule.resized(height, width) == expected, (height, width)
            compared += 1
    with pytest.raises(ValueError, match="at most 200 times"):
        StretchRule(28, 6272, 10**6, enlarges_sides=True).resized(1, 300)
    _, shape = open_tower(model[1])
    assert shape.size_rule(None, None) == StretchRule(8, 8 * 64, 4096 * 64, enlarges_sides=True)


def test_files_that_are_no_tower(model: tuple[Any, Path], tmp_path: Path) -> None:
    whole = model[1].with_name("mmproj.gguf").read_bytes()
    path = tmp_path / "mmproj.gguf"
    for old, new, words in (
        (b"mm.patch_merger.bias", b"mm.patch_merger.bios", "mm.patch_merger.bias is missing"),
        (
            b"v.position_embd.weight",
            b"v.position_embt.weight",
            "v.position_embd.weight is not a square table",
        ),
        (b"layer_norm_epsilon", b"layer_norm_epsilom", "layer_norm_epsilon"),
    ):
        assert old in whole
        path.write_bytes(whole.replace(old, new))
        with pytest.raises(ModelError, match=words):
            open_tower(path)
