"""Folders of Nemotron 3 and Granite 4 as they are published, and what of them is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from moeserve.models.errors import ModelError
from moeserve.models.feed_forward import DenseFfnShape, MoeShape
from moeserve.models.interface import ModelShape
from moeserve.models.open import open_model
from moeserve.models.registry import read_checked_shape
from tests.support.models.hugging_face_model import write_family


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    written = {name: tmp_path_factory.mktemp(name) for name in ("nemotron_h", "granitemoehybrid")}
    for name, folder in written.items():
        write_family(folder, name)
    return written


def shape_with(folder: Path, changes: dict[str, Any]) -> ModelShape:
    """The shape of the folder with another config.json."""
    path = folder / "config.json"
    before = path.read_text()
    try:
        config = json.loads(before) | changes
        path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
        return read_checked_shape(open_model(folder))
    finally:
        path.write_text(before)


def test_nemotron_3_as_it_is_published(folders: dict[str, Path]) -> None:
    """Letters for the kinds of layers, and an endless time step as JSON does not have it."""
    expected = shape_with(folders["nemotron_h"], {})
    published = {
        "layers_block_type": None,
        "hybrid_override_pattern": "ME*-ME",
        "num_hidden_layers": 6,
        "time_step_limit": [0.0, math.inf],
        "norm_eps": 1e-5,
    }
    assert shape_with(folders["nemotron_h"], published) == expected
    kinds = [type(layer.ffn) for layer in expected.layers]
    assert kinds == [type(None), MoeShape, type(None), DenseFfnShape, type(None), MoeShape]
    assert [layer.attention is not None for layer in expected.layers] == [i == 2 for i in range(6)]


def test_granite_4_as_it_is_published(folders: dict[str, Path]) -> None:
    expected = shape_with(folders["granitemoehybrid"], {})
    published = {"layer_types": ["mamba", "attention", "mamba"], "time_step_limit": None}
    assert shape_with(folders["granitemoehybrid"], published) == expected
    assert [layer.recurrence is None for layer in expected.layers] == [False, True, False]


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        (
            "nemotron_h",
            {"layers_block_type": None, "hybrid_override_pattern": "MX"},
            "hybrid_override_pattern",
        ),
        ("nemotron_h", {"layers_block_type": ["mamba", "rwkv"]}, "layers_block_type"),
        ("nemotron_h", {"layers_block_type": None}, "hybrid_override_pattern"),
        ("nemotron_h", {"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
        ("nemotron_h", {"mamba_num_heads": None}, "mamba_num_heads"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ("granitemoehybrid", {"position_embedding_type": "rope"}, "position_embedding_type"),
        ("granitemoehybrid", {"layer_types": ["mamba", "conv", "mamba"]}, "layer_types"),
        ("granitemoehybrid", {"mamba_n_heads": 3}, "."),
    ],
)
def test_other_variants_are_refused(
    folders: dict[str, Path], name: str, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(ModelError, match=why):
        shape_with(folders[name], changes)
