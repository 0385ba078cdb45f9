"""Damaged folders whose q, k and v are one matrix in parts (MiMo-V2.5's form)."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from moeserve.models.errors import ModelError
from moeserve.models.sources.gguf import Metadata
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.ranked_qkv import cut_in_parts, ranked_qkv
from moeserve.models.sources.huggingface.safetensors_file import StoredTensor
from moeserve.models.sources.regular_file import FileVersion

HERE = Path("folder")


def stored(name: str, shape: tuple[int, ...], dtype: str) -> StoredTensor:
    return StoredTensor(HERE, name, shape, dtype, 0, 0, mmap.mmap(-1, 1), FileVersion(0, 0, 0, 0))


@pytest.mark.parametrize("form", [("0.qkv.0.weight", "0.qkv.1.weight"), ("0.qkv.weight",)])
def test_heads_of_another_layer_are_refused(form: tuple[str, ...]) -> None:
    settings: dict[str, MetadataValue] = {
        "general.architecture": "m",
        "m.embedding_length": 32,
        "m.attention.head_count": 4,
        "m.attention.head_count_kv": np.array([2, 4]),
        "m.attention.key_length": 8,
    }
    metadata = Metadata(HERE, settings)
    for layer, is_read in ((0, True), (1, False), (2, True)):  # a layer without an entry has the heads of any
        parts = {
            f"{layer}{name[1:]}": stored(f"{layer}{name[1:]}", (64 // len(form), 32), "BF16") for name in form
        }
        made = ranked_qkv("qkv")(HERE, f"{layer}.", metadata, parts)
        if is_read:
            assert [one.shape[0] for _, one in made] == [32, 16, 16]
        else:
            with pytest.raises(ModelError, match="fit"):
                list(made)


def test_scales_without_dimensions_cut_nothing() -> None:
    tensors = {
        one.name: one
        for one in (stored("0.qkv.weight", (64, 32), "F8_E4M3"), stored("0.qkv.weight_scale_inv", (), "F32"))
    }
    assert cut_in_parts(HERE, tensors, "qkv", {"weight_block_size": [16, 16]}) == tensors


@pytest.mark.parametrize(
    ("shape", "dtype", "said"),
    [
        ((48, 32), "BF16", "different shapes"),
        ((64,), "BF16", "different shapes"),
        ((64, 32), "F16", "dtypes"),
    ],
)
def test_parts_that_differ_are_refused(shape: tuple[int, ...], dtype: str, said: str) -> None:
    parts = {"0.qkv.0.weight": stored("a", (64, 32), "BF16"), "0.qkv.1.weight": stored("b", shape, dtype)}
    with pytest.raises(ModelError, match=said):
        list(ranked_qkv("qkv")(HERE, "0.", Metadata(HERE, {}), parts))
