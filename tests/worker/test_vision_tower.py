"""Qwen3-VL's tower: pixels, embeddings and files that are none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from moeserve.models.errors import ModelError
from moeserve.visualserver.shapes.qwen3vl import Qwen3VlShape
from moeserve.visualserver.tower_file import open_tower
from moeserve.visualserver.towers.qwen3vl import Qwen3VlTower, merge_order
from tests.support.picture_fixture import MODEL, PICTURES, TOWER, errors, picture_cases


@pytest.fixture(scope="module")
def tower() -> Qwen3VlTower:
    file, shape = open_tower(TOWER)
    assert isinstance(shape, Qwen3VlShape)
    return Qwen3VlTower(file, shape)


@pytest.mark.parametrize("name", PICTURES)
def test_pixels_and_embeddings(tower: Qwen3VlTower, name: str) -> None:
    """transformers' in float32. llama.cpp's median relative error is 8e-4; it pads the wide picture: 0.6."""
    case = picture_cases()[name]
    pixels = case.resized()
    rows, columns = case.size[0] // 16, case.size[1] // 16
    patches = tower._patches_of(torch.from_numpy(pixels))[merge_order(rows, columns, 2)].numpy()
    twice = np.repeat(patches.reshape(-1, 3, 1, 256), 2, axis=2).reshape(len(patches), -1)
    assert np.array_equal(twice, case.truth["pixel_values"])
    found, truth = tower.encode(pixels), case.truth["embeddings"]
    assert found.shape == truth.shape
    assert np.median(errors(found, truth)) < 1e-5
    assert np.median(errors(case.llama_cpp["embeddings"], truth)) > 1e-4


def test_files_that_are_no_tower(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="its architecture is 'qwen35moe', not 'clip'"):
        open_tower(MODEL)
    whole = TOWER.read_bytes()
    for old, new, words in (
        (b"qwen3vl_merger", b"qwen2vl_merger", "has the projector 'qwen2vl_merger'"),
        (b"v.post_ln.bias", b"v.post_ln.bios", "v.post_ln.bias is missing"),
        (b"has_vision_encoder", b"has_visual_encoder", "has no vision encoder"),
    ):
        path = tmp_path / "mmproj.gguf"
        path.write_bytes(whole.replace(old, new))
        with pytest.raises(ModelError, match=words):
            open_tower(path)
    deep = whole.index(b"is_deepstack_layers") + len(b"is_deepstack_layers") + 16
    path.write_bytes(whole[:deep] + b"\1" + whole[deep + 1 :])
    with pytest.raises(ModelError, match=r"v\.deepstack\.0\.fc1\.weight is missing"):
        open_tower(path)
