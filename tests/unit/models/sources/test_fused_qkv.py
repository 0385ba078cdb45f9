"""Attention's q, k and v in one tensor of a GGUF."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from moeserve.models.sources.gguf import GGUFFile, open_gguf
from tests.support.models.gguf_bytes import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    Tensor,
    gguf_bytes,
    model_metadata,
)

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


def test_rows_tell_the_kv_heads_where_layers_differ_in_them(tmp_path: Path) -> None:
    """Values may be narrower than keys."""
    narrow = HEAD_DIM // 2
    tensors = [
        Tensor(
            f"blk.{layer}.attn_qkv.weight", (HIDDEN, HEADS * HEAD_DIM + kv_heads * (HEAD_DIM + narrow)), Q8_0
        )
        for layer, kv_heads in enumerate((1, 3))
    ]
    heads = {"attention__head_count_kv": [1, 3], "attention__value_length": narrow}
    file, _ = opened(tmp_path, *tensors, **heads)
    shapes = {name: tensor.shape[0] for name, tensor in file.tensors.items()}
    for layer, kv_heads in enumerate((1, 3)):
        assert shapes[f"blk.{layer}.attn_q.weight"] == HEADS * HEAD_DIM
        assert shapes[f"blk.{layer}.attn_k.weight"] == kv_heads * HEAD_DIM
        assert shapes[f"blk.{layer}.attn_v.weight"] == kv_heads * narrow


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        ((Tensor("blk.1.attn_qkv.weight", (HIDDEN, 33), Q8_0),), {}),
        ((WEIGHT, Tensor("blk.1.ssm_out.weight", (HIDDEN, 32), Q8_0)), {}),
        ((WEIGHT,), {"attention__head_count_kv": KV_HEADS + 1}),
        ((WEIGHT,), {"attention__head_count_kv": [KV_HEADS, KV_HEADS + 1]}),
        ((WEIGHT,), {"attention__head_count": None}),
        ((WEIGHT,), {"attention__head_count": 1 << 16, "attention__head_count_kv": [1, 1]}),
        ((Tensor("attn_qkv.weight", WEIGHT.dims, Q8_0),), {}),
    ],
    ids=[
        "other rows",
        "of a recurrence",
        "other heads",
        "heads of another layer",
        "no heads",
        "more heads than rows",
        "outside the layers",
    ],
)
def test_other_tensors_stay(tmp_path: Path, tensors: tuple[Tensor, ...], metadata: dict[str, object]) -> None:
    file, _ = opened(tmp_path, *tensors, **metadata)
    assert set(file.tensors) == {tensor.name for tensor in tensors}
