"""Folders of Granite with windows: names of tensors from before transformers 5, and settings that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeserve.models.attention import AttentionShape
from moeserve.models.errors import ModelError
from moeserve.models.open import open_folder
from moeserve.models.registry import read_shape
from tests.kernels.engines.model_engine import Engine
from tests.kernels.families.transformers_logits import TOKENS
from tests.kernels.folders.folder_variants import edit_config
from tests.kernels.operations import ISAS, stream_of
from tests.support.models.hugging_face_model import write_family

MOE = "granitemoe_swa"
EARLIER = {
    "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
}


def test_tensors_under_their_earlier_names_are_the_same_model(tmp_path: Path) -> None:
    write_family(tmp_path / "tiny", MOE)
    stream = stream_of(ISAS[0], threads=1)
    expected = Engine(stream, tmp_path / "tiny").logits(TOKENS)
    for file in (tmp_path / "tiny").glob("*.safetensors"):
        tensors = load_file(file)
        for name in list(tensors):
            layer, _, within = name.partition(".block")
            new = EARLIER.get("block" + within)
            if new is not None:
                tensors[f"{layer}.{new}"] = tensors.pop(name)
        save_file(tensors, file, metadata={"format": "pt"})
    (tmp_path / "tiny" / "model.safetensors.index.json").unlink(missing_ok=True)
    edit_config(tmp_path / "tiny", no_rope_layers=[1, 0, 1])
    assert torch.equal(Engine(stream, tmp_path / "tiny").logits(TOKENS), expected)


def test_without_lists_the_first_of_four_layers_sees_all(tmp_path: Path) -> None:
    write_family(tmp_path / "tiny", MOE, num_hidden_layers=5, layer_types=None, layer_rope_theta=None)
    edit_config(tmp_path / "tiny", layer_types=None, layer_rope_theta=None, sliding_window=None)
    mixers = [layer.mixer for layer in read_shape(open_folder(tmp_path / "tiny")).layers]
    assert all(isinstance(each, AttentionShape) and each.has_positions for each in mixers)
    assert [each.window for each in mixers if isinstance(each, AttentionShape)] == [0, 128, 128, 128, 0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_rope_theta": [1e4, 0]}, "'layer_rope_theta' is .*; a number for each of 3 layers"),
        ({"layer_rope_theta": [1e4, None, 1e4]}, "'layer_rope_theta' is None"),
        ({"layer_rope_theta": [1e4, 1.5, 1e4]}, "freq_base_by_layer has 1.5; 0, or 2 to 1e12"),
        ({"no_rope_layers": [1, 1, 1]}, "'layer_rope_theta' and 'no_rope_layers' do not agree"),
        (
            {"layer_rope_theta": None, "no_rope_layers": [1, 1, 0]},
            "'no_rope_layers' names layers without positions, and 'layer_rope_theta' is missing",
        ),
        ({"layer_types": ["full_attention"]}, "'layer_types' is"),
        ({"num_local_experts": None}, "'num_local_experts' is missing"),
        ({"num_experts_per_tok": 9}, "'num_experts_per_tok' is 9"),
        ({"mlp_bias": True}, "'mlp_bias' is True"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
    ],
    ids=str,
)
def test_other_settings_are_refused_by_name(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_family(tmp_path / "tiny", MOE)
    edit_config(tmp_path / "tiny", **changes)
    with pytest.raises(ModelError, match=said):
        read_shape(open_folder(tmp_path / "tiny"))
