"""PEFT folders with adapters of a small model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from moeserve.models.adapters.products import products_of
from moeserve.models.interface import ModelShape
from moeserve.models.registry import read_shape
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf import open_gguf
from tests.conftest import TINY_MODEL

Arrays = Mapping[str, npt.NDArray[Any]]
SHAPE: ModelShape = read_shape(open_gguf(TINY_MODEL))
PREFIX = "base_model.model.model.layers.0."
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["q_proj"]}


def pair(module: str, cols: int, rows: int, rank: int = 2, dtype: type = np.float32) -> Arrays:
    random = np.random.default_rng(len(module))
    return {
        f"{PREFIX}{module}.lora_A.weight": random.normal(size=(rank, cols)).astype(dtype),
        f"{PREFIX}{module}.lora_B.weight": random.normal(size=(rows, rank)).astype(dtype),
    }


Q = products_of(SHAPE, 0)[n.ATTN_Q]
GATE = products_of(SHAPE, 0)[n.FFN_GATE_EXPS]
GOOD = pair("self_attn.q_proj", Q.cols, Q.rows)


def write(folder: Path, tensors: Arrays = GOOD, **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | settings))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder
