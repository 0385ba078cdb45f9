"""GGUF files of LoRA adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
from gguf import GGUFWriter

from tests.support.models.peft_files import GOOD, PREFIX, SHAPE

Arrays = Mapping[str, npt.NDArray[Any]]


ATTENTION = {
    f"blk.0.attn_q.weight.lora_{matrix.lower()}": GOOD[f"{PREFIX}self_attn.q_proj.lora_{matrix}.weight"]
    for matrix in "AB"
}


def write(
    path: Path,
    tensors: Arrays = ATTENTION,
    *,
    kind: str = "adapter",
    architecture: str = SHAPE.architecture,
    form: str = "lora",
    alpha: float | None = 8.0,
) -> Path:
    writer = GGUFWriter(path, architecture)
    writer.add_type(kind)
    writer.add_string("adapter.type", form)
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
