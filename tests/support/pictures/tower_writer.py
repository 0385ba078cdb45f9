"""Writes towers with random weights: a folder under the names of its publisher, and an mmproj file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def write_mmproj(path: Path, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    """settings: an mmproj file's keys -> text, truth values, integers, floats or lists of floats."""
    writer = GGUFWriter(path, "clip")
    for key, value in settings.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values.detach().float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_to_folder(folder: Path, tensors: Tensors, **config: Any) -> None:
    """Adds tensors to a model's folder and settings to its config.json."""
    path = folder / "model.safetensors"
    for index in folder.glob("*.index.json"):
        index.unlink()
    whole: Tensors = {}
    for file in folder.glob("*.safetensors"):
        whole |= load_file(file)
        file.unlink()
    save_file({name: values.contiguous() for name, values in (whole | tensors).items()}, path)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | config))


@torch.no_grad()
def randomize(module: torch.nn.Module, seed: int) -> None:
    """Gives all weights values that make every part of a tower matter."""
    generator = torch.Generator().manual_seed(seed)
    for name, values in module.named_parameters():
        noise = torch.randn(values.shape, generator=generator)
        if "norm" in name and name.endswith(".weight"):
            values.copy_(1.0 + 0.2 * noise)
        elif values.dim() == 1:
            values.copy_(0.2 * noise)
        else:
            values.copy_(noise / values[0].numel() ** 0.5)
