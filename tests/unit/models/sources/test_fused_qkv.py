"""Attention's q, k and v in one tensor of a GGUF."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from moeserve.models.sources.gguf import GGUFFile, open_gguf
from tests.support.gguf_bytes import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, Tensor, gguf_bytes, model_metadata

Q8_0 = GGMLQuantizationType.Q8_0
ROWS = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
WEIGHT = Tensor("blk.1.attn_qkv.weight", (HIDDEN, sum(ROWS.values())), Q8_0)
BIAS = Tensor("blk.1.attn_qkv.bias", (sum(ROWS.values()),))


def opened(tmp_path: Path, *tensors: Tensor, **metadata: object) -> tuple[GGUFFile, bytes]:
    written = gguf_bytes(model_metadata(**metadata), tensors)
    path = tmp_path / "model.gguf"
    path.write_bytes(written)
    return open_gguf(path), written


@pytest.mark.parametrize("whole", [WEIGHT, BIAS], ids=["weight", "bias"])
def test_three_tensors_have_its_rows_in_turn(tmp_path: Path, whole: Tensor) -> None:
    file, written = opened(tmp_path, whole)
    suffix = whole.name.rpartition(".")[2]
    assert set(file.tensors) == {f"blk.1.attn_{part}.{suffix}" for part in ROWS}
    for part, rows in ROWS.items():
        assert file.tensors[f"blk.1.attn_{part}.{suffix}"].shape == (rows, *whole.dims[:-1])
    parts = np.concatenate([file.data(f"blk.1.attn_{part}.{suffix}") for part in ROWS])
    assert parts.tobytes() == written[-len(parts) - (-whole.nbytes % 32) :][: whole.nbytes]
    assert file.is_mapped


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        ((Tensor("blk.1.attn_qkv.weight", (HIDDEN, 33), Q8_0),), {}),
        ((WEIGHT, Tensor("blk.1.ssm_out.weight", (HIDDEN, 32), Q8_0)), {}),
        ((WEIGHT,), {"attention__head_count_kv": [1, 2]}),
        ((WEIGHT,), {"attention__head_count": None}),
        ((Tensor("attn_qkv.weight", WEIGHT.dims, Q8_0),), {}),
    ],
    ids=["other rows", "of a recurrence", "heads by layer", "no heads", "outside the layers"],
)
def test_other_tensors_stay(tmp_path: Path, tensors: tuple[Tensor, ...], metadata: dict[str, object]) -> None:
    file, _ = opened(tmp_path, *tensors, **metadata)
    assert set(file.tensors) == {tensor.name for tensor in tensors}
