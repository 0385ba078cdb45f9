"""Towers whose products have 16 bits, as on a GPU and with AVX-512 VNNI: embeddings beside transformers' in float32,
numbers beyond float16's range, and memory that does not suffice."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from moeserve.kernels.block_float import has_block_float
from moeserve.visualserver.shapes.qwen3vl import Qwen3VlShape
from moeserve.visualserver.tower_file import open_tower
from moeserve.visualserver.towers.load import make_tower
from moeserve.visualserver.towers.qwen3vl import Qwen3VlTower
from moeserve.visualserver.towers.tower import CPU, SliceEnded, Tower, TowerMemoryError
from moeserve.visualserver.towers.weights import InputFormat
from tests.support.pictures.picture_fixture import (
    GEMMA_TOWER,
    PICTURES,
    TOWER,
    errors,
    gemma_picture_cases,
    picture_cases,
)
from tests.support.pictures.random_tower import write_random_tower

SMALL = Qwen3VlShape(
    hidden=32, heads=2, layers=3, ffn=48, patch=4, merge=2, output=64, positions=6, deep=(1,)
)
PIXELS = np.random.default_rng(4).integers(0, 256, (32, 48, 3), np.uint8)


def tower_of(path: Path, inputs: InputFormat) -> Tower:
    return make_tower(*open_tower(path), CPU, inputs)


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("family", ["qwen", "gemma"])
def test_embeddings(family: str, name: str) -> None:
    """Float16 is no farther from transformers' than llama.cpp's F16 tower (whose wide picture of Qwen's is another
    one); bfloat16 would be."""
    path, cases = (TOWER, picture_cases()) if family == "qwen" else (GEMMA_TOWER, gemma_picture_cases())
    case = cases[name]
    truth, theirs = case.truth["embeddings"], case.llama_cpp["embeddings"]

    def error(inputs: InputFormat) -> float:
        tower = tower_of(path, inputs)
        found = tower.encode(case.resized())
        assert str(tower.weights.dtype) == f"torch.{inputs.name.lower()}"
        return float(np.median(errors(found, truth)))

    llama_cpp = min(float(np.median(errors(theirs, truth))), 8e-3)
    assert 1e-4 < error(InputFormat.FLOAT16) < llama_cpp
    assert error(InputFormat.BFLOAT16) > 5e-3


@pytest.mark.parametrize("name", PICTURES)
def test_embeddings_of_fused_layers(name: str) -> None:
    """As on a GPU."""
    case = picture_cases()[name]
    tower = tower_of(TOWER, InputFormat.FLOAT16)
    assert isinstance(tower, Qwen3VlTower)
    plain = tower.encode(case.resized())
    tower.fuse()
    found, truth = tower.encode(case.resized()), case.truth["embeddings"]
    error, llama_cpp = (
        float(np.median(errors(each, truth))) for each in (found, case.llama_cpp["embeddings"])
    )
    assert error < min(llama_cpp, 8e-3)
    # Another order of sums moves a number across float16's next boundary here and there.
    assert 0.0 < np.median(errors(found, plain)) < error


@pytest.mark.skipif(not has_block_float(), reason="this CPU lacks AVX-512 VNNI")
@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("family", ["qwen", "gemma"])
def test_embeddings_in_block_floating_point(family: str, name: str) -> None:
    """No farther from transformers' than half of llama.cpp's F16 tower (3e-4 beside 8e-4)."""
    path, cases = (TOWER, picture_cases()) if family == "qwen" else (GEMMA_TOWER, gemma_picture_cases())
    case = cases[name]
    found = tower_of(path, InputFormat.BLOCK_FLOAT).encode(case.resized())
    error = np.median(errors(found, case.truth["embeddings"]))
    assert 1e-5 < error < 4e-4
    assert error < np.median(errors(case.llama_cpp["embeddings"], case.truth["embeddings"])) / 2


@pytest.mark.parametrize(
    ("factors", "is_narrow"),
    [
        ({"ln2": 2.0**15, "ffn_up.weight": 2.0**-6}, False),
        ({"ln2": 2.0**-20, "ffn_up.weight": 2.0**20}, True),
    ],
    ids=["a product's inputs", "its weights"],
)
def test_numbers_beyond_float16(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, factors: dict[str, float], *, is_narrow: bool
) -> None:
    """Such inputs make all later products float32; such weights stay float32."""
    path = write_random_tower(tmp_path / "small.gguf", SMALL, factors=factors)
    narrow = tower_of(path, InputFormat.FLOAT16)
    with caplog.at_level(logging.WARNING):
        found = narrow.encode(PIXELS)
    assert np.median(errors(found, tower_of(path, InputFormat.FLOAT32).encode(PIXELS))) < 2e-3
    assert narrow.weights.is_narrow == is_narrow
    assert ("exceeds float16" in caplog.text) != is_narrow


def test_memory_that_does_not_suffice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A second attempt without the blocks of other sizes; then an error that says what to do."""
    tower = tower_of(write_random_tower(tmp_path / "small.gguf", SMALL), InputFormat.FLOAT32)
    truth, whole, left = tower.encode(PIXELS), tower._tokens, 1

    def failing(pixels: torch.Tensor, slice_ended: SliceEnded) -> torch.Tensor:
        nonlocal left
        left -= 1
        if left >= 0:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return whole(pixels, slice_ended)

    monkeypatch.setattr(tower, "_tokens", failing)
    assert np.array_equal(tower.encode(PIXELS), truth)
    left = 2
    with pytest.raises(TowerMemoryError, match="--mmproj-device cpu"):
        tower.encode(PIXELS)
