"""Folders with a layer's experts in two tensors: which of the two published layouts they have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from moeserve.models.sources.gguf.metadata import Metadata
from moeserve.models.sources.huggingface.expert_matrices import transposed_experts
from moeserve.models.sources.huggingface.safetensors_file import read_tensors

EXPERTS, HIDDEN = 3, 64


@pytest.mark.parametrize(
    "width", [32, 48], ids=["gate and up are as wide as the hidden state", "they are not"]
)
@pytest.mark.parametrize("is_transposed", [True, False])
def test_the_layout_is_told_from_both_tensors(tmp_path: Path, width: int, is_transposed: bool) -> None:
    rng = np.random.default_rng(3)
    gate_up = rng.standard_normal((EXPERTS, 2 * width, HIDDEN), dtype=np.float32)
    down = rng.standard_normal((EXPERTS, HIDDEN, width), dtype=np.float32)
    tensors = {"mlp.experts.gate_up_proj": gate_up, "mlp.experts.down_proj": down}
    if is_transposed:
        tensors = {name: np.ascontiguousarray(tensor.transpose(0, 2, 1)) for name, tensor in tensors.items()}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    _, stored = read_tensors(path)
    shape = Metadata(path, {"general.architecture": "a", "a.embedding_length": HIDDEN})
    made = dict(transposed_experts(path, "", shape, stored))
    assert bool(stored) is not is_transposed
    expected = (gate_up[:, :width], gate_up[:, width:], down) if is_transposed else ()
    assert len(made) == len(expected)
    for tensor, values in zip(made.values(), expected, strict=True):
        np.testing.assert_array_equal(tensor.make().view(np.float32).reshape(tensor.shape), values)
