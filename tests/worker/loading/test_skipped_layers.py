"""Layers for further tokens (MTP) behind those that are run: known, skipped, and the log says how much that saves."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moeserve.models.errors import ModelError
from moeserve.models.open import open_folder
from moeserve.models.registry import read_checked_shape
from moeserve.models.skipped_layers import SkippedLayers, skipped_layers
from moeserve.worker.loading.cpu.load import load_cpu_runner
from tests.gpu.driver import Driver, small_config
from tests.support.models.hugging_face_model import write_family

LAYERS = 3
SIDE = 64  # of each matrix for further tokens: 16 KiB of floats


def write(folder: Path, model_type: str, prefix: str, **settings: Any) -> Path:
    """With what is published behind its last layer, as far as a name may tell."""
    write_family(folder, model_type, **settings)
    (folder / "model.safetensors.index.json").unlink()
    names = ("eh_proj.weight", "enorm.weight", "self_attn.q_proj.weight", "embed_tokens.weight")
    save_file(
        {f"{prefix}{name}": torch.zeros(SIDE, SIDE) for name in names}, folder / "model-mtp.safetensors"
    )
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    prefix = f"model.layers.{LAYERS}."
    return write(tmp_path / "tiny", "glm4_moe", prefix, num_nextn_predict_layers=1)


@pytest.fixture
def qwen_folder(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny", "qwen3_5_moe_text", "mtp.layers.0.")


@pytest.mark.parametrize("fixture", ["folder", "qwen_folder"])
def test_they_are_skipped_and_the_log_says_so(
    fixture: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    path = request.getfixturevalue(fixture)
    source = open_folder(path)
    skipped = skipped_layers(read_checked_shape(source), source)
    assert skipped == SkippedLayers(1, num_bytes=4 * SIDE * SIDE * 4)
    with caplog.at_level(logging.INFO):
        runner = load_cpu_runner(small_config(path, threads=1), lambda *_: None)
    said = [record.message for record in caplog.records if "MTP" in record.message]
    assert said == [
        "skipped 1 layer for the tokens after the next one (MTP): 0.00 GiB of the model are not loaded"
    ]
    assert len(Driver(runner).generate(0, [1, 2, 3], 2)) == 2


def test_a_file_that_announces_them_and_has_none(tmp_path: Path) -> None:
    write_family(tmp_path / "tiny", "glm4_moe", num_nextn_predict_layers=1)
    source = open_folder(tmp_path / "tiny")
    assert skipped_layers(read_checked_shape(source), source) == SkippedLayers(0, 0)


def test_other_layers_are_refused_by_name(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = 0
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"tensor 'model\.layers\.3\.[a-z_.]+' has no place in a glm4_moe"):
        open_folder(folder)
