"""Layers for further tokens (MTP) behind those that are run: known, not loaded, and the log says so."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moeserve.models.errors import ModelError
from moeserve.models.open import open_folder
from moeserve.models.registry import read_checked_shape
from moeserve.worker.cpu_loading import load_cpu_runner
from tests.gpu.driver import Driver, small_config
from tests.support.hugging_face_model import write_family

LAYERS = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With what GLM publishes behind its last layer, as far as a name may tell."""
    folder = tmp_path / "tiny"
    write_family(folder, "glm4_moe", num_nextn_predict_layers=1)
    (folder / "model.safetensors.index.json").unlink()
    names = ("eh_proj.weight", "enorm.weight", "self_attn.q_proj.weight", "embed_tokens.weight")
    extra = {f"model.layers.{LAYERS}.{name}": torch.zeros(8, 8) for name in names}
    save_file(extra, folder / "model-mtp.safetensors")
    return folder


def test_they_are_passed_over_and_the_log_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    shape = read_checked_shape(open_folder(folder))
    assert (shape.num_layers, shape.num_skipped_layers) == (LAYERS, 1)
    with caplog.at_level(logging.INFO):
        runner = load_cpu_runner(small_config(folder, threads=1), lambda *_: None)
    said = [record.message for record in caplog.records if "MTP" in record.message]
    assert said == ["layer 3 of the file, for the tokens after the next one (MTP), are not loaded"]
    assert len(Driver(runner).generate(0, [1, 2, 3], 2)) == 2


def test_other_layers_are_refused_by_name(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = 0
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"tensor 'model\.layers\.3\.[a-z_.]+' has no place in a glm4_moe"):
        open_folder(folder)
