"""Settings in which models of one family differ: computed as transformers does, from folders and from GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moeserve.models.errors import ModelError
from moeserve.models.open import open_folder, open_model
from moeserve.models.registry import read_checked_shape
from tests.kernels.engines.model_engine import Engine
from tests.kernels.families.transformers_logits import TOKENS
from tests.kernels.folders.folder_variants import assert_is_near_transformers, edit_config
from tests.kernels.operations import ISAS, stream_of
from tests.support.models.folder_as_gguf import write_gguf
from tests.support.models.hugging_face_model import write_family, write_model, write_qwen2_moe
from tests.support.nightly import nightly_after

SLIDING, FULL = "sliding_attention", "full_attention"
DENSE = {"intermediate_size": 192}
WINDOW = {"use_sliding_window": True, "sliding_window": 16}


def write(folder: Path, model_type: str, **changes: Any) -> Any:
    from transformers import AutoModelForCausalLM

    if model_type == "qwen3_moe":
        write_model(folder, **changes)
    elif model_type == "qwen2_moe":
        write_qwen2_moe(folder, **changes)
    else:
        return write_family(folder, model_type, **changes)
    return AutoModelForCausalLM


@pytest.mark.parametrize(
    ("model_type", "changes"),
    nightly_after(
        11,
        [
            ("qwen3_moe", {"norm_topk_prob": False}),
            ("qwen2_moe", {"norm_topk_prob": True}),
            ("qwen3", {"attention_bias": True}),
            ("qwen3_next", {"norm_topk_prob": False}),
            ("qwen3_5_moe_text", {"attention_bias": True}),
            ("gpt_oss", {"attention_bias": False}),
            ("deepseek_v3", {"attention_bias": True}),
            ("deepseek_v2", {"attention_bias": True}),
            ("qwen3_moe", {"decoder_sparse_step": 2, **DENSE}),
            ("qwen3_moe", {"mlp_only_layers": [0], **DENSE}),
            ("qwen3_moe", {"attention_bias": True}),
            ("qwen3_moe", WINDOW),
            ("qwen2_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [2], **DENSE}),
            ("qwen2_moe", {"qkv_bias": False}),
            ("qwen2_moe", {**WINDOW, "max_window_layers": 1}),
            ("qwen2_moe", {**WINDOW, "layer_types": [FULL, SLIDING, SLIDING]}),
            ("qwen3", {**WINDOW, "max_window_layers": 1}),
            ("qwen3", {**WINDOW, "layer_types": [SLIDING, FULL, SLIDING]}),
            ("qwen3_next", {"decoder_sparse_step": 2, **DENSE}),
            ("qwen3_next", {"attention_bias": True}),
            ("gpt_oss", {"layer_types": [FULL, SLIDING, SLIDING]}),
            ("glm4_moe_lite", {"attention_bias": True}),
        ],
    ),
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_it_is_what_transformers_computes(
    model_type: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tiny"
    model = write(folder, model_type, **changes)
    assert_is_near_transformers(folder, model, monkeypatch)
    write_gguf(folder, tmp_path / "tiny.gguf")
    of_folder, of_file = (
        Engine(stream_of(ISAS[0], threads=1), path).logits(TOKENS)
        for path in (folder, tmp_path / "tiny.gguf")
    )
    assert torch.equal(of_file, of_folder)


@pytest.mark.parametrize(
    ("model_type", "written", "changes", "cause"),
    [
        ("qwen3_moe", {}, {"attention_bias": True}, r"attn_q\.bias' is missing"),
        ("qwen3_moe", {"attention_bias": True}, {"attention_bias": False}, r"attn_q\.bias' has no place"),
        ("deepseek_v3", {}, {"attention_bias": True}, r"attn_q_a\.bias' is missing"),
        ("deepseek_v2", {"attention_bias": True}, {"attention_bias": False}, r"attn_output\.bias' has no place"),
        ("qwen3_moe", {}, {"mlp_only_layers": [0], **DENSE}, r"layers\.0\.mlp\.gate_proj\.weight' is missing"),
        ("qwen3_moe", {}, {"mlp_only_layers": [0], "intermediate_size": None}, "'intermediate_size' is missing"),
        ("qwen3_moe", {}, {"mlp_only_layers": 5}, "'mlp_only_layers' is 5; a list of layers is expected"),
        ("qwen3_moe", {}, {"decoder_sparse_step": 0}, "'decoder_sparse_step' is 0; 1 to"),
        ("qwen3_moe", {}, {"decoder_sparse_step": "2"}, "'decoder_sparse_step' is '2'; 1 to"),
        ("qwen3_moe", {}, {"norm_topk_prob": 1}, "'norm_topk_prob' is 1, a boolean is expected"),
        ("qwen3_moe", {}, {**WINDOW, "sliding_window": 0}, "'sliding_window' is 0; 1 to"),
        ("qwen2_moe", {}, {"qkv_bias": False}, r"attn_q\.bias' has no place"),
        ("qwen2_moe", {}, {"layer_types": [SLIDING] * 3}, "'use_sliding_window' is not true .* leave 'layer_types'"),
        ("qwen2_moe", {}, {**WINDOW, "layer_types": [SLIDING]}, "'layer_types' is .* of each layer is expected"),
        ("gpt_oss", {}, {"layer_types": [FULL, "chunked", FULL]}, "of each layer is expected"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_tensors_is_refused(
    model_type: str, written: dict[str, Any], changes: dict[str, Any], cause: str, tmp_path: Path
) -> None:
    write(tmp_path / "tiny", model_type, **written)
    edit_config(tmp_path / "tiny", **changes)
    with pytest.raises(ModelError, match=cause):
        read_checked_shape(open_folder(tmp_path / "tiny"))


def test_where_config_json_says_nothing_transformers_defaults_hold(tmp_path: Path) -> None:
    write(tmp_path / "tiny", "qwen3_moe")
    edit_config(tmp_path / "tiny", norm_topk_prob=None)
    (layer,) = set(read_checked_shape(open_folder(tmp_path / "tiny")).layers)
    assert layer.moe is not None
    assert not layer.moe.router.normalize


def test_latent_attention_has_no_biases_where_config_json_says_nothing(tmp_path: Path) -> None:
    write(tmp_path / "tiny", "deepseek_v3")
    edit_config(tmp_path / "tiny", attention_bias=None)
    latent = read_checked_shape(open_folder(tmp_path / "tiny")).latent
    assert latent is not None
    assert (latent.input_bias, latent.output_bias) == (False, False)


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"leading_dense_block_count": 1}, None),
        ({"leading_dense_block_count": 2}, "leading_dense_block_count' is 2, and layer 1 has experts"),
        ({"interleave_moe_layer_step": 2}, "interleave_moe_layer_step' is 2, and layer 2 has experts"),
    ],
)
def test_keys_of_a_gguf_agree_with_its_tensors(
    settings: dict[str, int], cause: str | None, tmp_path: Path
) -> None:
    write(tmp_path / "tiny", "qwen3_moe", mlp_only_layers=[0], **DENSE)
    write_gguf(tmp_path / "tiny", tmp_path / "tiny.gguf", **settings)
    source = open_model(tmp_path / "tiny.gguf")
    if cause is None:
        assert read_checked_shape(source).moe_layers == (1, 2)
        return
    with pytest.raises(ModelError, match=cause):
        read_checked_shape(source)
