"""Settings of the folders of Trinity, Hunyuan-A13B, Mellum 2 and MiMo-V2: as transformers takes them, as they are
published, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moeserve.models.errors import ModelError
from moeserve.models.open import open_folder
from tests.kernels.engines.model_engine import Engine
from tests.kernels.families.transformers_logits import TOKENS
from tests.kernels.folders.folder_variants import assert_is_near_transformers, edit_config
from tests.kernels.operations import ISAS, stream_of
from tests.support.models.hugging_face_model import write_family
from tests.support.models.quantized_folders import BY_NAME, quantize_folder

SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("afmoe", {"layer_types": [FULL, SLIDING, SLIDING]}),
        ("afmoe", {"num_dense_layers": 2, "num_shared_experts": 1, "route_scale": 2.826}),
        ("hunyuan_v1_moe", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ("hunyuan_v1_moe", {"tie_word_embeddings": True}),
        ("mellum", {}),
        ("mimo_v2_flash", {"mlp_layer_types": ["sparse", "dense", "sparse"], "attention_value_scale": None}),
        ("mimo_v2_flash", {"layer_types": None, "num_hidden_layers": 7, "routed_scaling_factor": 2.5}),
    ],
    ids=str,
)
def test_settings_mean_what_transformers_makes_of_them(
    model_type: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_family(tmp_path / "tiny", model_type, **changes)
    assert_is_near_transformers(tmp_path / "tiny", model, monkeypatch)


def test_hunyuans_settings_are_lists_by_layer_as_it_is_published(tmp_path: Path) -> None:
    write_family(tmp_path / "tiny", "hunyuan_v1_moe")
    expected = Engine(stream_of(ISAS[0], threads=1), tmp_path / "tiny").logits(TOKENS)
    edit_config(
        tmp_path / "tiny",
        moe_topk=[2] * 3,
        moe_intermediate_size=[96] * 3,
        num_shared_expert=[1] * 3,
        head_dim=None,
        attention_head_dim=64,
        use_mixed_mlp_moe=True,
        rope_parameters=None,
        rope_theta=1e4,
        rope_scaling={
            "type": "dynamic",
            "alpha": 1000.0,
            "factor": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
        },
    )
    assert torch.equal(Engine(stream_of(ISAS[0], threads=1), tmp_path / "tiny").logits(TOKENS), expected)


def test_a_mimo_as_it_is_published(tmp_path: Path) -> None:
    """With other names of what differs by layer; and in 8-bit floats, with blocks for further tokens."""
    write_family(tmp_path / "tiny", "mimo_v2_flash", torch.float32)
    quantize_folder(tmp_path / "tiny", tmp_path / "published", BY_NAME["fp8-block"])
    expected = Engine(stream_of(ISAS[0], threads=1), tmp_path / "tiny").logits(TOKENS)
    edit_config(
        tmp_path / "published",
        layer_types=None,
        hybrid_layer_pattern=[0, 1, 1],
        mlp_layer_types=None,
        moe_layer_freq=[0, 1, 1],
        rope_parameters=None,
        rope_theta=5e6,
        swa_rope_theta=1e4,
        partial_rotary_factor=0.334,
        swa_num_key_value_heads=2,
        swa_num_attention_heads=4,
        swa_head_dim=96,
        swa_v_head_dim=64,
        sliding_window=16,
        sliding_window_size=16,
        routed_scaling_factor=None,
        n_shared_experts=None,
    )
    source = open_folder(tmp_path / "published")
    assert source.tensors["blk.1.ffn_down_exps.weight"].type.name == "FP8_G32"
    found = Engine(stream_of(ISAS[0], threads=1), tmp_path / "published").logits(TOKENS)
    errors = ((found - expected) ** 2).mean(-1) / (expected**2).mean()
    assert errors.median() < 1e-6


@pytest.mark.parametrize(
    ("model_type", "changes", "said"),
    [
        ("afmoe", {"mup_enabled": False}, "'mup_enabled' is False; only True is supported"),
        ("afmoe", {"route_norm": False}, "'route_norm' is False"),
        ("afmoe", {"score_func": "softmax"}, "'score_func' is 'softmax'"),
        ("afmoe", {"layer_types": [FULL]}, "'layer_types' is"),
        ("afmoe", {"num_hidden_layers": "x"}, "'num_hidden_layers' is 'x'"),
        ("mimo_v2_flash", {"layer_types": None, "hybrid_layer_pattern": [0, 1]}, "'hybrid_layer_pattern' is"),
        ("mimo_v2_flash", {"mlp_layer_types": ["dense", "x", "sparse"]}, "'mlp_layer_types' is"),
        (
            "mimo_v2_flash",
            {"swa_head_dim": 64},
            "'swa_head_dim' is 64 and 'head_dim' 96; only equal ones are supported",
        ),
        ("mimo_v2_flash", {"add_full_attention_sink_bias": True}, "'add_full_attention_sink_bias' is True"),
        ("mimo_v2_flash", {"rope_parameters": {SLIDING: {}}}, "'rope_parameters' is"),
        (
            "mimo_v2_flash",
            {"rope_parameters": {SLIDING: {"rope_type": "yarn"}, FULL: {}}},
            "RoPE is scaled by",
        ),
        ("mimo_v2_flash", {"rope_parameters": None, "rope_theta": "x"}, "'rope_theta' is 'x'"),
        ("mimo_v2_flash", {"sliding_window": None}, "'sliding_window' is None"),
        ("hunyuan_v1_moe", {"moe_topk": [2, 2, 1]}, "'moe_topk' is .* the same of all layers"),
        ("hunyuan_v1_moe", {"moe_topk": []}, "'moe_topk' is"),
        ("hunyuan_v1_moe", {"num_shared_expert": [1, 2, 1]}, "'num_shared_expert' is"),
        (
            "hunyuan_v1_moe",
            {"intermediate_size": None, "moe_intermediate_size": None},
            "'moe_intermediate_size' is None",
        ),
        ("hunyuan_v1_moe", {"use_cla": True}, "'use_cla' is True"),
        (
            "hunyuan_v1_moe",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "'alpha' of rope_type 'dynamic' is None",
        ),
    ],
    ids=str,
)
def test_settings_that_would_be_computed_wrongly_are_refused(
    model_type: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    write_family(tmp_path / "tiny", model_type)
    edit_config(tmp_path / "tiny", **changes)
    with pytest.raises(ModelError, match=said):
        open_folder(tmp_path / "tiny")
