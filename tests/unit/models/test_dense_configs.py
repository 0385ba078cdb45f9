"""config.json of dense families as they are published."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeserve.models.errors import ModelError
from moeserve.models.open import open_model
from moeserve.models.registry import family_of_config, read_shape
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.huggingface.config_json import metadata_of
from tests.conftest import OWN_FIXTURES

SIZES: dict[str, Any] = {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 200_064,
}
# Of Phi-4-mini: older names, and lists of 48 numbers.
PHI4_MINI: dict[str, Any] = SIZES | {
    "model_type": "phi3",
    "max_position_embeddings": 131_072,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    "sliding_window": 262_144,
}
# Of Qwen2.5-VL: the text's settings beside those of vision.
QWEN25_VL: dict[str, Any] = SIZES | {
    "model_type": "qwen2_5_vl",
    "max_position_embeddings": 128_000,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "use_sliding_window": False,
    "vision_config": {"depth": 32},
}


def metadata(config: dict[str, Any]) -> dict[str, Any]:
    path = Path("config.json")
    family, settings = family_of_config(path, config)
    assert family.hugging_face is not None
    found = metadata_of(path, settings, family.architecture, family.hugging_face)
    return {name.removeprefix(f"{family.architecture}."): value for name, value in found.items()}


def test_phi4_mini_as_it_is_published() -> None:
    found = metadata(PHI4_MINI)
    assert found["rope.dimension_count"] == 96
    assert found["rope.scaling.original_context_length"] == 4096
    assert math.isclose(found["rope.scaling.attn_factor"], math.sqrt(1 + 5 / 12))
    assert np.unique(found["rope.longrope.long_factors"]).tolist() == [2.0]


def test_phi4_as_it_is_published() -> None:
    """Without stretching, and with heads that rotate as a whole."""
    change = {"rope_scaling": None, "partial_rotary_factor": None, "sliding_window": None}
    found = metadata({name: value for name, value in (PHI4_MINI | change).items() if value is not None})
    assert (found["rope.dimension_count"], found["rope.freq_base"]) == (128, 1e4)
    assert not any(name.startswith(("rope.scaling", "rope.longrope", "attention.sliding")) for name in found)


def test_qwen25_vl_as_it_is_published() -> None:
    found = metadata(QWEN25_VL)
    assert found["rope.dimension_sections"].tolist() == [16, 24, 24, 0]
    assert found["embedding_length"] == 3072


def test_mistral_small_in_a_model_with_vision() -> None:
    text = SIZES | {
        "model_type": "mistral",
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rope_theta": 1e9,
    }
    found = metadata({"model_type": "mistral3", "text_config": text})
    assert (found["general.architecture"], found["rope.freq_base"]) == ("llama", 1e9)


# Of Ministral 3 with 8B parameters.
YARN: dict[str, Any] = {
    "rope_type": "yarn", "type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 16_384, "max_position_embeddings": 262_144, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
MINISTRAL: dict[str, Any] = SIZES | {
    "model_type": "ministral3",
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "rope_parameters": YARN,
}


def test_a_context_ends_where_queries_would_be_scaled() -> None:
    """The file says 4,096 tokens, and 1,024 before YaRN stretches them."""
    shape = read_shape(open_model(OWN_FIXTURES / "tiny-ministral3-f16.gguf"))
    assert shape.context_length == 1024


def test_ministral_in_a_model_with_vision() -> None:
    found = metadata({"model_type": "mistral3", "text_config": MINISTRAL})
    assert found["general.architecture"] == "mistral3"
    assert (found["rope.scaling.yarn_log_multiplier"], found["attention.temperature_scale"]) == (1.0, 0.1)


@pytest.mark.parametrize(
    "change", [{"mscale": 0.5}, {"attention_factor": 1.5}, {"low_freq_factor": 1.0}], ids=str
)
def test_another_yarn_of_ministral_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"supported"):
        metadata(MINISTRAL | {"rope_parameters": YARN | change})


# Of Olmo-3-7B-Instruct: YaRN's settings outside `rope_parameters` are those of layers without a window.
OLMO3: dict[str, Any] = SIZES | {
    "model_type": "olmo3",
    "max_position_embeddings": 65_536,
    "rope_theta": 500_000,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 8192,
    },
    "sliding_window": 4096,
}  # fmt: skip
# Of EXAONE-4.0-32B.
EXAONE4: dict[str, Any] = SIZES | {
    "model_type": "exaone4",
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "sliding_window": 4096,
    "sliding_window_pattern": "LLLG",
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}  # fmt: skip


def test_olmo3_as_it_is_published() -> None:
    found = metadata(OLMO3)
    assert found["attention.sliding_window_pattern"].tolist() == [True, True, True, False]
    assert found["rope.scaling.yarn_attn_factor"] == 1.2079441541679836
    assert "rope.freq_base_swa" not in found


def test_a_gguf_states_the_whole_factor_of_yarn() -> None:
    """As config.json does: 1.2079 is YaRN's own for a stretch of 8, and no factor beside it. llama.cpp's converter
    writes what it reads there."""
    source = open_model(OWN_FIXTURES / "tiny-olmo3-f16.gguf")
    whole = source.metadata.require_float("olmo2.rope.scaling.yarn_attn_factor", 0.0, 10.0)
    assert math.isclose(whole, 1.2079441547393799)
    assert math.isclose(read_shape(source).rope_scaling.attn_factor, 1.0, abs_tol=1e-6)


def test_olmo2_has_no_windows() -> None:
    found = metadata(OLMO3 | {"model_type": "olmo2", "rope_scaling": None})
    assert not any("sliding_window" in name for name in found)


def test_windows_of_olmo3_that_are_stretched_are_refused() -> None:
    kind = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
    with pytest.raises(ModelError, match=r"of sliding_attention is 'linear'"):
        metadata(
            OLMO3
            | {"rope_scaling": None, "rope_parameters": {"full_attention": kind, "sliding_attention": kind}}
        )


def test_exaone4_as_it_is_published() -> None:
    found = metadata(EXAONE4)
    assert found["attention.sliding_window_pattern"].tolist() == [True, True, True, False]
    assert (found["rope.llama3.factor"], found["attention.sliding_window"]) == (16.0, 4096)
    without = metadata(EXAONE4 | {"layer_types": None, "sliding_window_pattern": 4})
    assert without["attention.sliding_window_pattern"].tolist() == [True, True, True, False]


def test_exaone_4_5_as_it_is_published() -> None:
    """Its text is EXAONE 4's, under one of two names."""
    for name in ("exaone4", "exaone4_5_text"):
        text = EXAONE4 | {"model_type": name, "num_nextn_predict_layers": 1}
        found = metadata({"model_type": "exaone4_5", "text_config": text, "vision_config": {}})
        assert found["attention.sliding_window_pattern"].tolist() == [True, True, True, False]
        assert (found["general.architecture"], found["block_count"]) == ("exaone4", 4)


# Of GLM-4.1V-9B-Thinking.
GLM_VISION: dict[str, Any] = SIZES | {
    "model_type": "glm4v_text",
    "attention_bias": True,
    "max_position_embeddings": 65_536,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]},
}


def test_glm_with_vision_as_it_is_published() -> None:
    found = metadata({"model_type": "glm4v", "text_config": GLM_VISION, "vision_config": {}})
    assert found["rope.dimension_sections"].tolist() == [8, 12, 12, 0]
    assert (found["rope.dimension_count"], found[n.HAS_QKV_BIAS], found["rope.in_halves"]) == (
        64,
        True,
        False,
    )
    text = GLM_VISION | {"model_type": "glm_ocr_text", "num_nextn_predict_layers": 1, "attention_bias": None}
    found = metadata({"model_type": "glm_ocr", "text_config": text, "vision_config": {}})
    assert (found[n.HAS_QKV_BIAS], found["block_count"], found["nextn_predict_layers"]) == (False, 5, 1)
    with pytest.raises(ModelError, match="attention_bias"):
        metadata(GLM_VISION | {"model_type": "glm4", "attention_bias": "yes", "rope_scaling": None})


def test_dense_gemma4_as_it_is_published() -> None:
    """31B has neither experts nor inputs for each layer; config.json states the widths of both kinds of heads."""
    text = SIZES | {
        "model_type": "gemma4_text", "head_dim": 256, "global_head_dim": 512, "num_key_value_heads": 16,
        "num_global_key_value_heads": 4, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
        "enable_moe_block": False, "num_experts": None, "moe_intermediate_size": None, "top_k_experts": None,
        "sliding_window": 1024, "final_logit_softcapping": 30.0, "num_kv_shared_layers": 0,
        "max_position_embeddings": 262_144, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    }  # fmt: skip
    found = metadata({"model_type": "gemma4", "text_config": text, "vision_config": {}})
    assert found["attention.head_count_kv"].tolist() == [16, 16, 16, 4]
    assert found["feed_forward_length"].tolist() == [8192] * 4
    assert (found["embedding_length_per_layer_input"], "expert_count" in found) == (0, False)
    small = text | {
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 256,
    }
    found = metadata({"model_type": "gemma4", "text_config": small, "vision_config": {}})
    assert found["feed_forward_length"].tolist() == [8192, 8192, 16384, 16384]
    assert (found["attention.shared_kv_layers"], found["embedding_length_per_layer_input"]) == (2, 256)


def test_gemma2_as_it_is_published() -> None:
    """Gemma-2-27B: every other layer has a window, and scores are scaled by the hidden size."""
    config = SIZES | {
        "model_type": "gemma2",
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 144,
        "sliding_window": 4096,
    }
    found = metadata(config)
    assert found["attention.sliding_window_pattern"].tolist() == [True, False, True, False]
    assert (found["attention.scale"], found["attn_logit_softcapping"]) == (1 / 12, 50.0)
    uncapped = metadata(config | {"attn_logit_softcapping": None})
    assert (uncapped["attn_logit_softcapping"], uncapped["final_logit_softcapping"]) == (0.0, 30.0)


def test_a_small_exaone4_has_no_windows() -> None:
    change = {"sliding_window": None, "sliding_window_pattern": None, "layer_types": ["full_attention"] * 4}
    assert not any("sliding_window" in name for name in metadata(EXAONE4 | change))
    with pytest.raises(ModelError, match=r"'layer_types' is missing"):
        metadata(EXAONE4 | {"layer_types": None})


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": "2"}},
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [0.0]}},
        {"rope_scaling": {"type": "longrope", "short_mscale": 1.1}},
        {"attention_bias": True},
    ],
    ids=str,
)
def test_what_would_be_computed_wrongly_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"supported|expected"):
        metadata(PHI4_MINI | change)
