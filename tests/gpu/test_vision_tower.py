"""Vision towers on a GPU: embeddings beside transformers' in float32, and the memory that the plan counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from moeserve.visualserver.shapes.qwen3vl import Qwen3VlShape
from moeserve.visualserver.tower_file import open_tower
from moeserve.visualserver.tower_memory import gpu_bytes
from moeserve.visualserver.towers.load import make_tower
from moeserve.visualserver.towers.qwen3vl import Qwen3VlTower
from moeserve.visualserver.towers.weights import InputFormat
from tests.support.pictures.picture_fixture import (
    GEMMA_TOWER,
    PICTURES,
    TOWER,
    errors,
    gemma_picture_cases,
    picture_cases,
)
from tests.support.pictures.random_tower import QWEN36, write_random_tower

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("family", ["qwen", "gemma"])
def test_embeddings(family: str, name: str) -> None:
    """No farther from transformers' than llama.cpp's, whose wide picture of Qwen's is another one."""
    path, cases = (TOWER, picture_cases()) if family == "qwen" else (GEMMA_TOWER, gemma_picture_cases())
    case, tower = cases[name], make_tower(*open_tower(path), GPU)
    found, truth = tower.encode(case.resized()), case.truth["embeddings"]
    assert tower.weights.is_narrow
    ours, theirs = (float(np.median(errors(each, truth))) for each in (found, case.llama_cpp["embeddings"]))
    print(f"{family}, {name}: {ours:.2e}; llama.cpp {theirs:.2e}")
    assert ours <= min(theirs, 8e-3)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_tower(tmp_path_factory.mktemp("large") / "mmproj.gguf", QWEN36)


def test_memory(large: Path) -> None:
    """The largest picture, and others behind it, stay within what the plan counts."""
    tower = make_tower(*open_tower(large), GPU)
    torch.cuda.empty_cache()
    tower.warm(4096)
    counted = gpu_bytes(QWEN36, 4096)
    for height, width in ((2144, 1952), (96, 96), (4096, 1024), (512, 8192), (2144, 1952)):
        pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8)
        found = tower.encode(pixels)
        assert found.shape == (height * width // 1024, 2048)
        assert np.isfinite(found).all()
    print(f"{torch.cuda.max_memory_reserved(GPU) / 2**20:.0f} MiB of {counted / 2**20:.0f} counted")
    assert torch.cuda.memory_reserved(GPU) <= counted
    assert torch.cuda.max_memory_allocated(GPU) > counted / 3


def test_a_published_size(large: Path) -> None:
    """Beside the same tower in float32."""
    file, shape = open_tower(large)
    assert isinstance(shape, Qwen3VlShape)
    pixels = np.random.default_rng(1).integers(0, 256, (512, 768, 3), np.uint8)
    exact = Qwen3VlTower(file, shape, GPU, InputFormat.FLOAT32).encode(pixels)
    error = float(np.median(errors(Qwen3VlTower(file, shape, GPU).encode(pixels), exact)))
    print(f"median relative error {error:.2e}")
    assert error < 2e-3
