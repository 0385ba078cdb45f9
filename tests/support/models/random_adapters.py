"""LoRA adapters of random numbers for a model's shape, in PEFT's folders."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moeserve.models.adapters.products import products_of
from moeserve.models.interface import ModelShape
from moeserve.models.sources.gguf import names as n

Halves = npt.NDArray[np.float16]

_GATED = ("gate_proj", "up_proj", "down_proj")
_MODULES = {
    n.ATTN_Q: "self_attn.q_proj",
    n.ATTN_K: "self_attn.k_proj",
    n.ATTN_V: "self_attn.v_proj",
    n.ATTN_OUTPUT: "self_attn.o_proj",
    n.FFN_GATE_INP: "mlp.gate",
    **dict(zip(n.FFN_PARTS, (f"mlp.{name}" for name in _GATED), strict=True)),
    **dict(zip(n.SHARED_PARTS, (f"mlp.shared_expert.{name}" for name in _GATED), strict=True)),
    **dict(zip(n.EXPERT_PARTS, (f"mlp.experts.{{}}.{name}" for name in _GATED), strict=True)),
}


def write_random_adapter(
    folder: Path, shape: ModelShape, rank: int, seed: int, *, parts: Collection[str], size: float
) -> None:
    """Writes random adapters of the products in `parts` (adapters/products.py) that the model has. size: the standard
    deviation of both matrices' elements, so that B A x is of about size^2 * sqrt(rank) of x's length."""
    random = np.random.default_rng(seed)
    tensors: dict[str, Halves] = {}
    for layer in range(shape.num_layers):
        for part, product in products_of(shape, layer).items():
            if part not in parts:
                continue
            for expert in range(product.experts):
                module = f"base_model.model.model.layers.{layer}.{_MODULES[part].format(expert)}"
                for matrix, form in (("A", (rank, product.cols)), ("B", (product.rows, rank))):
                    scale = np.float32(size / form[1] ** 0.5 if matrix == "A" else size)
                    numbers = random.standard_normal(form, np.float32) * scale
                    tensors[f"{module}.lora_{matrix}.weight"] = numbers.astype(np.float16)
    folder.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    _write_safetensors(folder / "adapter_model.safetensors", tensors)


def _write_safetensors(path: Path, tensors: dict[str, Halves]) -> None:
    """https://huggingface.co/docs/safetensors: the length of a JSON header, the header, the tensors' bytes."""
    header, at = {}, 0
    for name, numbers in tensors.items():
        header[name] = {"dtype": "F16", "shape": numbers.shape, "data_offsets": [at, at + numbers.nbytes]}
        at += numbers.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for numbers in tensors.values():
            file.write(numbers.tobytes())
