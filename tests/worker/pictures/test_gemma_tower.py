"""Gemma 4's tower: its embeddings beside transformers', and files that are none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeserve.models.errors import ModelError
from moeserve.visualserver.shapes.gemma4 import Gemma4Shape
from moeserve.visualserver.tower_file import open_tower
from moeserve.visualserver.towers.gemma4 import Gemma4Tower
from tests.support.pictures.gemma_tower_file import TruthTower
from tests.support.pictures.picture_fixture import GEMMA_TOWER, PICTURES, errors, gemma_picture_cases


def tower_of(path: Path) -> Gemma4Tower:
    file, shape = open_tower(path)
    assert isinstance(shape, Gemma4Shape)
    return Gemma4Tower(file, shape)


@pytest.mark.parametrize("name", PICTURES)
def test_embeddings(name: str) -> None:
    """transformers' in float32. llama.cpp's median relative error is 7e-3 to 8e-3."""
    case = gemma_picture_cases()[name]
    found, truth = tower_of(GEMMA_TOWER).encode(case.resized()), case.truth["embeddings"]
    assert found.shape == truth.shape
    assert np.median(errors(found, truth)) < 1e-5
    assert np.median(errors(case.llama_cpp["embeddings"], truth)) > 1e-3


@pytest.mark.parametrize("standardized", [False, True])
@pytest.mark.parametrize("clamped", [False, True])
def test_the_towers_of_all_sizes(tmp_path: Path, *, standardized: bool, clamped: bool) -> None:
    """26B-A4B's and 31B's standardise tokens, E2B's and E4B's clamp what goes into products and comes out of them."""
    truth = TruthTower(standardized=standardized, clamped=clamped)
    tower = tower_of(truth.write(tmp_path / "mmproj.gguf"))
    assert (tower.shape.is_standardized, tower.shape.is_clamped) == (standardized, clamped)
    pixels = np.random.default_rng(1).integers(0, 256, (24, 60, 3), dtype=np.uint8)
    found, expected = tower.encode(pixels), truth.encode(pixels)
    assert found.shape == expected.shape == (10, 64)
    assert errors(found, expected).max() < 1e-5
    other = TruthTower(standardized=not standardized, clamped=clamped)
    assert errors(found, other.encode(pixels)).max() > 1e-2


def test_files_that_are_no_tower(tmp_path: Path) -> None:
    whole = TruthTower(standardized=True, clamped=True).write(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "mmproj.gguf"
    for old, new, words in (
        (
            b"gemma4v",
            b"gemma4u",
            "has the projector 'gemma4u'; supported are 'qwen3vl_merger', 'gemma3', 'gemma4v'",
        ),
        (b"v.std_scale", b"v.std_skale", "v.std_scale is missing"),
        (b"v.blk.1.attn_out.output_max", b"v.blk.1.attn_out.output_mix", "attn_out.output_max is missing"),
        (b"v.position_embd.weight", b"v.position_embt.weight", "v.position_embd.weight is not a table"),
    ):
        assert old in whole
        path.write_bytes(whole.replace(old, new))
        with pytest.raises(ModelError, match=words):
            open_tower(path)
