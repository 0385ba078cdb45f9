"""Experts of a layer of which only some have zero points are refused by name when the folder is opened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeserve.models.errors import ModelError
from moeserve.models.open import open_folder
from tests.support.models.hugging_face_model import write_model
from tests.support.models.quantized_folders import BY_NAME, quantize_folder

EXPERT = "model.layers.0.mlp.experts.1.up_proj"


def test_experts_with_and_without_zero_points_are_refused(tmp_path: Path) -> None:
    floats, folder = tmp_path / "floats", tmp_path / "quantized"
    write_model(floats, torch.float32, num_hidden_layers=1, hidden_size=256, moe_intermediate_size=128)
    quantize_folder(floats, folder, BY_NAME["w4a16-asym"])
    open_folder(folder)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        tensors.pop(f"{EXPERT}.weight_zero_point", None)
        save_file(tensors, file)
    with pytest.raises(
        ModelError, match=rf"'{EXPERT}.weight' is Q4_0 \[.*experts.0.*is INT4_G32 with zero points"
    ):
        open_folder(folder)
