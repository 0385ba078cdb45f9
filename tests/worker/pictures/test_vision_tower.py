"""Qwen3-VL's tower: pixels, embeddings and files that are none."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moeserve.models.errors import ModelError
from moeserve.processes.tower_page import TowerPage
from moeserve.visualserver.encoding_pace import EncodingPace
from moeserve.visualserver.shapes.qwen3vl import Qwen3VlShape
from moeserve.visualserver.slices import Slices
from moeserve.visualserver.tower_file import open_tower
from moeserve.visualserver.towers.axial import merge_order
from moeserve.visualserver.towers.qwen3vl import Qwen3VlTower
from tests.support.pictures.picture_fixture import MODEL, PICTURES, TOWER, errors, picture_cases
from tests.support.pictures.random_tower import QWEN36, write_random_tower


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


def test_slices_beside_open_requests(tmp_path: Path) -> None:
    """The encoding takes a tenth of the cores' time; its result is the same bit for bit."""
    shape = replace(QWEN36, hidden=288, heads=4, layers=4, ffn=512, output=256)
    file, _ = open_tower(write_random_tower(tmp_path / "mmproj.gguf", shape))
    tower, page = Qwen3VlTower(file, shape), TowerPage(tmp_path / "page")
    pixels = np.random.default_rng(2).integers(0, 256, (128, 192, 3), np.uint8)
    expected = tower.encode(pixels)  # torch has loaded what it needs
    slices = Slices(EncodingPace(0.1), page, tower)
    page.open_requests = 2
    began, used = time.monotonic(), tower.used_s()
    for _ in range(2):  # the second one waits for what the first one owes
        with slices.picture():
            found = tower.encode(pixels, slices.ended)
        assert np.array_equal(found, expected)
    used, seconds = tower.used_s() - used, time.monotonic() - began
    assert seconds > 4 * used, "ten times as long, but for the last slice"
    assert page.encoding == (0.0, 0.0)


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
