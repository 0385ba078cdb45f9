"""Gemma 3's pictures: the tower's embeddings and the text model's logits beside transformers', and the processor."""

from __future__ import annotations

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
from moeserve.visualserver.picture_size import SquareRule
from moeserve.visualserver.tower_file import open_tower
from moeserve.visualserver.towers.load import make_tower
from moeserve.worker.loading.cpu.load import build_cpu_runner
from tests.support.pictures.gemma3_model import IMAGE, SIDE, TOKENS, write_model
from tests.support.pictures.span_steps import distance, span_logits, span_of
from tests.support.worker.served_answers import load

PIXELS = np.random.default_rng(2).integers(0, 256, (2, SIDE, SIDE, 3), dtype=np.uint8)
PICTURE = [IMAGE] * TOKENS
PROMPT = [50, 60, 70, *PICTURE, 80, *PICTURE, 91, *range(100, 115)]
STARTS = (3, 4 + TOKENS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("gemma3") / "tiny"
    return write_model(folder), folder


def test_the_tower_and_the_logits_behind_pictures(model: tuple[Any, Path], tmp_path: Path) -> None:
    """From the folder and from both mmproj files the same bits. Each picture's rows see the whole picture, in layers
    with a window (17, one more than a picture has tokens) and without; steps that end between pictures change no bit.
    """
    made, folder = model
    pixel_values = torch.from_numpy(PIXELS).permute(0, 3, 1, 2).float() / 127.5 - 1.0
    ids = torch.tensor([PROMPT])
    kinds = (ids == IMAGE).long()
    with torch.no_grad():
        truth = made.model.get_image_features(pixel_values, return_dict=True).pooler_output.numpy()
        expected = made(input_ids=ids, pixel_values=pixel_values, token_type_ids=kinds).logits[0].numpy()
    tower = make_tower(*open_tower(folder))
    rows = [tower.encode(pixels) for pixels in PIXELS]
    for found, of_theirs in zip(rows, truth, strict=True):
        assert found.shape == of_theirs.shape == (TOKENS, 128)
        assert np.linalg.norm(found - of_theirs) < 1e-5 * np.linalg.norm(of_theirs)
    for name in ("mmproj.gguf", "mmproj-swapped.gguf"):
        assert np.array_equal(make_tower(*open_tower(folder.with_name(name))).encode(PIXELS[0]), rows[0])
    assert open_tower(folder)[1].fits(read_checked_shape(open_metadata(folder)))

    files = EmbeddingFiles(tmp_path / "spans")
    runner = build_cpu_runner(load(folder), files)
    assert runner.ready().whole_spans
    spans = [span_of(files, start, part) for start, part in zip(STARTS, rows, strict=True)]
    whole = span_logits(runner, PROMPT, spans, 64)
    assert distance(expected, whole) < 1e-4
    assert np.array_equal(span_logits(runner, PROMPT, spans, 4 + TOKENS), whole)
    turned = [span_of(files, start, part) for start, part in zip(STARTS, rows[::-1], strict=True)]
    assert distance(expected, span_logits(runner, PROMPT, turned, 64)) > 1e-3


def test_the_square() -> None:
    """A picture of any shape is stretched to it, bilinearly, as by Pillow in the publisher's processor."""
    rule = SquareRule(8, SIDE)
    for height, width in ((1, 4000), (31, 7), (SIDE, SIDE), (700, 1300)):
        assert rule.resized(height, width) == (SIDE, SIDE)
        noise = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
        picture = Image.fromarray(noise)
        expected = np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR))
        assert np.array_equal(_resized(picture, rule), expected)


def test_bounds_in_tokens(model: tuple[Any, Path]) -> None:
    _, shape = open_tower(model[1])
    assert shape.default_max_tokens == TOKENS
    assert shape.size_rule(None, None) == shape.size_rule(None, 256) == SquareRule(8, SIDE)
    with pytest.raises(ConfigError, match="--image-max-tokens: a picture of Gemma 3 always has 16 tokens"):
        shape.size_rule(None, TOKENS - 1)
    with pytest.raises(ConfigError, match="--image-min-tokens: a picture of Gemma 3 always has 16 tokens"):
        shape.size_rule(8, None)


def test_files_that_are_no_tower(model: tuple[Any, Path], tmp_path: Path) -> None:
    whole = model[1].with_name("mmproj.gguf").read_bytes()
    path = tmp_path / "mmproj.gguf"
    for old, new, words in (
        (b"mm.soft_emb_norm", b"mm.soft_emb_morm", "mm.soft_emb_norm.weight is missing"),
        (b"v.blk.1.ffn_down.bias", b"v.blk.1.ffn_down.bios", "v.blk.1.ffn_down.bias is missing"),
        (b"clip.vision.image_size", b"clip.vision.image_siz_", "image_size"),
        # The key's value, a uint32 of 32, as 36.
        (b"image_size\x04\0\0\0\x20", b"image_size\x04\0\0\0\x24", "do not hold 4 x 4 whole tokens of 8"),
    ):
        assert old in whole
        path.write_bytes(whole.replace(old, new))
        with pytest.raises(ModelError, match=words):
            open_tower(path)
