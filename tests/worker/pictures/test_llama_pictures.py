"""Llama 4's pictures: the tower's embeddings and the text model's logits beside transformers', and the tiles."""

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
from moeserve.models.open import open_metadata
from moeserve.models.registry import read_checked_shape
from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.visualserver.decode_process import _resized
from moeserve.visualserver.picture_size import TileRule, tiles_of
from moeserve.visualserver.tower_file import open_tower
from moeserve.visualserver.towers.load import make_tower
from moeserve.worker.loading.cpu.load import build_cpu_runner
from tests.support.models.transformers_source import function_of
from tests.support.pictures.llama_model import IMAGE, TILE, write_model
from tests.support.pictures.span_steps import distance, span_logits, span_of
from tests.support.worker.served_answers import load

ROWS, COLUMNS, EACH = 1, 2, 9  # tiles, and a tile's tokens
PIXELS = np.random.default_rng(2).integers(0, 256, ((ROWS + 1) * TILE, COLUMNS * TILE, 3), dtype=np.uint8)
X, Y, WHOLE = 2, 3, 4  # tokens
PATCHES = [IMAGE] * EACH
TOKENS = [50, 60, 70, *PATCHES, X, *PATCHES, Y, WHOLE, *PATCHES, 91, *range(100, 112)]
STARTS = (3, 4 + EACH, 6 + 2 * EACH)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("tiles") / "tiny"
    return write_model(folder), folder


def test_the_tower_and_the_logits_behind_a_picture(model: tuple[Any, Path], tmp_path: Path) -> None:
    """From the folder and from the mmproj file the same bits; whole and with chunks' borders in tiles, too."""
    made, folder = model
    tiles = [np.ascontiguousarray(tile) for tile in tiles_of(PIXELS, TILE)]
    assert len(tiles) == ROWS * COLUMNS + 1
    pixel_values = torch.from_numpy(np.stack(tiles)).permute(0, 3, 1, 2).float() / 127.5 - 1.0
    with torch.no_grad():
        seen = made.vision_model(pixel_values).last_hidden_state
        truth = made.multi_modal_projector(seen.flatten(0, 1)).numpy()
        # transformers' whole model fails here: its text's answer has no `image_outputs`.
        ids = torch.tensor([TOKENS])
        inputs = made.get_input_embeddings()(ids)
        inputs[ids == IMAGE] = torch.from_numpy(truth)
        expected = made.language_model(inputs_embeds=inputs).logits[0].numpy()
    rows = make_tower(*open_tower(folder)).encode(PIXELS)
    assert rows.shape == truth.shape == (3 * EACH, 128)
    assert np.linalg.norm(rows - truth) < 1e-5 * np.linalg.norm(truth)
    assert np.array_equal(make_tower(*open_tower(folder.with_name("mmproj.gguf"))).encode(PIXELS), rows)
    assert open_tower(folder)[1].fits(read_checked_shape(open_metadata(folder)))

    files = EmbeddingFiles(tmp_path / "spans")
    runner = build_cpu_runner(load(folder), files)
    parts = np.split(rows, 3)
    spans = [span_of(files, start, part) for start, part in zip(STARTS, parts, strict=True)]
    whole = span_logits(runner, TOKENS, spans, 64)
    assert distance(expected, whole) < 1e-4
    assert np.array_equal(span_logits(runner, TOKENS, spans, 7), whole)
    turned = [span_of(files, start, part) for start, part in zip(STARTS, parts[::-1], strict=True)]
    assert distance(expected, span_logits(runner, TOKENS, turned, 64)) > 1e-3


def test_tiles_are_the_processor_s() -> None:
    """200 pictures."""
    best_fit = function_of("llama4/image_processing_llama4.py", "get_best_fit")
    supported = function_of("llama4/image_processing_llama4.py", "find_supported_resolutions")
    undistorted = function_of("llama4/image_processing_llama4.py", "get_max_res_without_distortion")
    rng = random.Random(5)
    canvases = {most: torch.tensor(supported(most, _Square())) for most in (1, 4, 16)}
    for _ in range(200):
        largest = rng.choice((40, 800, 6000))
        size = rng.randrange(1, largest), rng.randrange(1, largest)
        most = rng.choice((1, 4, 16))
        canvas = tuple(best_fit(size, canvases[most]).tolist())
        # As `_preprocess` has it: small pictures are enlarged to a tile's side at most.
        target = min(max(size[0], 336), canvas[0]), min(max(size[1], 336), canvas[1])
        drawn = tuple(max(side, 1) for side in undistorted(size, target))
        rule = TileRule(28, 336, most)
        assert rule.drawn(*size) == drawn, size
        rows, columns = canvas[0] // 336, canvas[1] // 336
        assert rule.grid(*size) == (rows, columns), size
        strip = 336 if rows * columns > 1 else 0
        assert rule.resized(*size) == (canvas[0] + strip, canvas[1]), size


class _Square:
    height = width = 336


def test_the_canvas() -> None:
    """Tiles, black where the picture has none, and the whole picture below them."""
    picture = Image.new("RGB", (600, 300), "white")
    pixels = _resized(picture, TileRule(28, 336, 16))
    assert pixels.shape == (2 * 336, 2 * 336, 3)
    assert pixels[:300, :600].min() == 255
    assert pixels[300:336].max() == pixels[:336, 600:].max() == pixels[336:, 336:].max() == 0
    assert pixels[336:, :336].min() == 255
    assert _resized(picture, TileRule(28, 336, 1)).shape == (336, 336, 3)


def test_bounds_in_tokens(model: tuple[Any, Path]) -> None:
    _, shape = open_tower(model[1])
    assert shape.size_rule(None, None) == TileRule(8, TILE, 16)
    assert shape.size_rule(None, 40) == TileRule(8, TILE, 3)
    assert shape.size_rule(None, 9) == TileRule(8, TILE, 1)
    with pytest.raises(ConfigError, match="--image-max-tokens: a tile of Llama 4 has 9 tokens"):
        shape.size_rule(None, 8)
    with pytest.raises(ConfigError, match="--image-min-tokens: Llama 4 divides each picture into tiles"):
        shape.size_rule(8, None)


def test_files_that_are_no_tower(model: tuple[Any, Path], tmp_path: Path) -> None:
    whole = model[1].with_name("mmproj.gguf").read_bytes()
    path = tmp_path / "mmproj.gguf"
    for old, new, words in (
        (b"v.class_embd", b"v.class_embt", "v.class_embd is missing"),
        (b"mm.model.mlp.2.weight", b"mm.model.mlp.2.weighs", "mm.model.mlp.2.weight is not a matrix"),
        (b"clip.vision.image_size", b"clip.vision.image_siz_", "image_size"),
    ):
        assert old in whole
        path.write_bytes(whole.replace(old, new))
        with pytest.raises(ModelError, match=words):
            open_tower(path)
