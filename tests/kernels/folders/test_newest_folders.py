"""Folders of Llama 4, Kimi-Linear, MiniMax-M3, Mistral 4, Step-3.5 and Laguna: beside transformers, in the forms in
which they are published, in 8-bit floats, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeserve.models.errors import ModelError
from moeserve.models.interface import ModelShape
from moeserve.models.open import open_folder
from moeserve.models.registry import read_checked_shape
from tests.kernels.engines.model_engine import Engine
from tests.kernels.families.transformers_logits import TOKENS
from tests.kernels.operations import ISAS, stream_of
from tests.support.models.newest_families import NEWEST, round_attended, write_newest
from tests.support.nightly import nightly_after

Tensors = dict[str, torch.Tensor]
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def logits_of(folder: Path) -> torch.Tensor:
    return Engine(stream_of(ISAS[0], threads=1), folder).logits(TOKENS)


def stored(folder: Path) -> Tensors:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def rewrite(
    folder: Path, rename: Callable[[str], str] = str, more: Tensors | None = None, **changes: object
) -> None:
    """Gives tensors other names, adds some, and writes them as one file. changes: of config.json; ... removes."""
    tensors = {rename(name): tensor for name, tensor in stored(folder).items()} | (more or {})
    for file in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        file.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    set_config(folder, **changes)


def set_config(folder: Path, **changes: object) -> None:
    """Changes config.json, of a multimodal model its text's; ... removes."""
    path = folder / "config.json"
    whole = json.loads(path.read_text())
    config = whole.get("text_config", whole)
    config |= changes
    for name in [name for name, value in config.items() if value is ...]:
        del config[name]
    path.write_text(json.dumps(whole))


@pytest.mark.parametrize("dtype", nightly_after(1, [torch.bfloat16, torch.float32]), ids=str)
@pytest.mark.parametrize("model_type", NEWEST)
def test_a_folder_is_what_transformers_computes(
    model_type: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But where a key is rounded to the other side: there a router may choose another expert."""
    model = write_newest(tmp_path / "tiny", model_type, dtype).from_pretrained(
        tmp_path / "tiny", dtype=torch.float32
    )
    round_attended(model, monkeypatch)
    with torch.no_grad():
        truth = model(torch.tensor([TOKENS])).logits[0]
    logits = logits_of(tmp_path / "tiny")
    errors = ((logits - truth) ** 2).mean(-1) / (truth**2).mean()
    assert errors.median() < 1e-7
    assert (logits.argmax(-1) == truth.argmax(-1)).float().mean() > 0.95


def wrap(folder: Path, model_type: str) -> None:
    """Makes a text model the inner one of a multimodal one, whose tower is left out."""
    text = json.loads((folder / "config.json").read_text())
    tower = {
        "vision_model.patch_embedding.weight": torch.ones(4, 4),
        "multi_modal_projector.linear_1.weight": torch.ones(4, 4),
    }
    rewrite(folder, lambda name: f"language_model.{name}", tower)
    (folder / "config.json").write_text(
        json.dumps({"model_type": model_type, "text_config": text, "vision_config": {}})
    )


def test_a_llama_4_as_it_is_published(tmp_path: Path) -> None:
    """Multimodal; in compressed-tensors' checkpoints each expert's matrices are apart."""
    write_newest(tmp_path, "llama4_text")
    expected = logits_of(tmp_path)
    wrap(tmp_path, "llama4")
    set_config(tmp_path, no_rope_layers=[], moe_layers=..., layer_types=...)
    assert torch.equal(logits_of(tmp_path), expected)
    split: Tensors = {}
    for name, tensor in stored(tmp_path).items():
        if not name.endswith("experts.gate_up_proj"):
            continue
        down = stored(tmp_path)[name.replace("gate_up", "down")]
        for expert, (both, last) in enumerate(zip(tensor, down, strict=True)):
            under = name.replace("gate_up_proj", f"{expert}.")
            gate, up = both.T.chunk(2)
            split |= {
                f"{under}gate_proj.weight": gate,
                f"{under}up_proj.weight": up,
                f"{under}down_proj.weight": last.T,
            }
    rewrite(
        tmp_path,
        lambda name: re.sub(r"experts\.(gate_up|down)_proj$", r"multi_modal_projector.\1", name),
        split,
    )
    rewrite(tmp_path, lambda name: name[name.find("multi_modal") :] if "multi_modal" in name else name)
    assert torch.equal(logits_of(tmp_path), expected)


def test_a_kimi_linear_as_it_is_published(tmp_path: Path) -> None:
    write_newest(tmp_path, "kimi_linear")
    assert any(
        ".block_sparse_moe.gate_proj." in name for name in stored(tmp_path)
    )  # as transformers writes it
    expected = logits_of(tmp_path)
    linear = {
        "full_attn_layers": [3],
        "kda_layers": [1, 2, 4],
        "head_dim": 32,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    }
    rewrite(
        tmp_path,
        lambda name: re.sub(r"block_sparse_moe\.((gate|up|down)_proj)", r"mlp.\1", name),
        linear_attn_config=linear, layer_types=..., mlp_layer_types=..., first_k_dense_replace=1, linear_head_dim=...,
        linear_num_heads=..., linear_conv_kernel_dim=..., num_experts_per_token=2, num_experts_per_tok=...,
        num_local_experts=..., num_experts=8, num_shared_experts=2, n_shared_experts=..., moe_renormalize=True,
        norm_topk_prob=..., num_expert_group=1, n_group=..., model_max_length=512, max_position_embeddings=...,
        mla_use_nope=True, moe_router_activation_func="sigmoid", use_grouped_topk=True,
    )  # fmt: skip
    assert torch.equal(logits_of(tmp_path), expected)


def test_a_minimax_m3_as_it_is_published(tmp_path: Path) -> None:
    write_newest(tmp_path, "minimax_m3_vl")
    assert any(
        name.startswith("language_model.model.layers.1.block_sparse_moe.") for name in stored(tmp_path)
    )
    expected = logits_of(tmp_path)
    sparse = {
        "use_sparse_attention": True, "sparse_index_dim": 64, "sparse_num_index_heads": 2, "sparse_topk_blocks": 4,
        "sparse_block_size": 16, "sparse_score_type": "max", "sparse_init_block": 0, "sparse_local_block": 1,
        "sparse_attention_freq": [0, 1, 1], "sparse_disable_index_value": [0, 1, 1],
    }  # fmt: skip
    settings: dict[str, Any] = {
        "model_type": ..., "layer_types": ..., "mlp_layer_types": ..., "moe_layer_freq": [0, 1, 1],
        "rope_parameters": ..., "rope_theta": 1e6, "partial_rotary_factor": 0.5, "hidden_act": "swigluoai",
        "use_gemma_norm": True, "n_shared_experts": 1, "sparse_attention_config": sparse,
        **dict.fromkeys(("index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks"), ...),
    }  # fmt: skip
    rewrite(tmp_path, more={"mtp.layers.0.norm.weight": torch.ones(4)}, **settings)
    assert torch.equal(logits_of(tmp_path), expected)
    shape = read_checked_shape(open_folder(tmp_path))
    assert [layer.attention is not None and layer.attention.indexer is not None for layer in shape.layers] == [
        False, True, True,
    ]  # fmt: skip


def test_a_step_35_as_it_is_published(tmp_path: Path) -> None:
    """Not multimodal, with lists that go on for three layers that predict further tokens."""
    write_newest(tmp_path, "step3p7")
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    expected = logits_of(tmp_path)
    types = [*text["layer_types"], FULL, FULL, FULL]
    own = {
        "model_type": "step3p5", "num_nextn_predict_layers": 3, "layer_types": types, "moe_layers_enum": "1,2,3",
        "rope_theta": [5e5 if kind == FULL else 1e4 for kind in types], "use_rope_layers": [],
        "partial_rotary_factors": [0.5 if kind == FULL else 1.0 for kind in types], "yarn_only_types": [FULL],
        "rope_scaling": {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 64},
        "attention_other_setting": {"attention_type": SLIDING, "num_attention_heads": 6, "num_attention_groups": 2,
                                    "head_dim": 64, "true_head_dim": 64},
        "swiglu_limits": [0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.0], "num_attention_groups": 2, "moe_num_experts": 8,
        "swiglu_limits_shared": [0.5, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0], "moe_top_k": 2, "norm_expert_weight": True,
    }  # fmt: skip
    for name in (
        *("rope_parameters", "mlp_layer_types", "num_sliding_attention_heads", "per_layer_config"),
        *("num_key_value_heads", "n_routed_experts", "num_experts_per_tok"),
    ):
        del text[name]
    (tmp_path / "config.json").write_text(json.dumps(text | own))
    more = {f"model.layers.{layer}.eh_proj.weight": torch.ones(4, 4) for layer in (4, 5, 6)}
    rewrite(tmp_path, more=more)
    assert torch.equal(logits_of(tmp_path), expected)
    assert read_checked_shape(open_folder(tmp_path)).num_skipped_layers == 3


def fp8(tensor: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes, and what they mean."""
    codes = (tensor.float() / scale).to(torch.float8_e4m3fn)
    return codes, codes.float() * scale


def test_experts_of_8_bits_in_one_tensor_are_kept_as_they_are(tmp_path: Path) -> None:
    """Mistral 4's, with one scale for each expert, and scales for activations, which are ignored."""
    write_newest(tmp_path / "floats", "mistral4", torch.float32)
    write_newest(tmp_path / "fp8", "mistral4", torch.float32)
    tensors = stored(tmp_path / "fp8")
    codes: Tensors = {}
    floats: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            scale = 0.001 * (1 + torch.arange(8.0)).view(8, 1, 1)
            codes |= {f"{name}_scale_inv": scale, f"{name}_activation_scale": torch.ones(8)}
        elif name.endswith("o_proj.weight"):
            scale = torch.tensor(0.01)
            codes |= {f"{name}_scale_inv": scale, name.replace("weight", "activation_scale"): torch.ones(1)}
        else:
            continue
        codes[name], floats[name] = fp8(tensor, scale)
    rewrite(tmp_path / "floats", more=floats)
    rewrite(tmp_path / "fp8", more=codes)
    set_config(tmp_path / "fp8", quantization_config={"quant_method": "fp8", "activation_scheme": "static"})
    wrap(tmp_path / "fp8", "mistral3")
    source = open_folder(tmp_path / "fp8")
    assert source.tensors["blk.1.ffn_up_exps.weight"].type.name.startswith("FP8")
    found, expected = logits_of(tmp_path / "fp8"), logits_of(tmp_path / "floats")
    errors = ((found - expected) ** 2).mean(-1) / (expected**2).mean()
    assert errors.median() < 1e-6


def test_blocks_of_experts_of_8_bits_in_one_tensor(tmp_path: Path) -> None:
    """Step-3.5's: a scale for each block of 64 rows and columns of each of an expert's matrices."""
    for name in ("floats", "fp8"):
        write_newest(tmp_path / name, "step3p7", torch.float32)
    tensors = stored(tmp_path / "fp8")
    codes, floats = {}, {}
    for name in [name for name in tensors if re.search(r"moe\.(gate|up|down)_proj", name)]:
        experts, rows, cols = tensors[name].shape
        scales = 0.001 + 0.01 * torch.rand(experts, -(-rows // 64), -(-cols // 64))
        spread = scales.repeat_interleave(64, 1).repeat_interleave(64, 2)[:, :rows, :cols]
        codes[name], floats[name] = fp8(tensors[name], spread)
        codes[f"{name}_scale_inv"] = scales
    rewrite(tmp_path / "floats", more=floats)
    rewrite(tmp_path / "fp8", more=codes)
    path = tmp_path / "fp8" / "config.json"
    quantized = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantized}))
    found, expected = logits_of(tmp_path / "fp8"), logits_of(tmp_path / "floats")
    errors = ((found - expected) ** 2).mean(-1) / (expected**2).mean()
    assert errors.median() < 1e-6


def shape_of(folder: Path) -> ModelShape:
    return read_checked_shape(open_folder(folder))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    written = {name: tmp_path_factory.mktemp(name) for name in NEWEST}
    for name, folder in written.items():
        write_newest(folder, name)
    return written


def test_a_llama_4_attends_to_as_much_as_is_computed(folders: dict[str, Path]) -> None:
    """Not beyond a chunk, nor where layers without positions scale their queries."""
    folder, before = folders["llama4_text"], (folders["llama4_text"] / "config.json").read_text()
    try:
        for changes, context in (
            ({}, 8191),
            ({"attention_chunk_size": 64}, 64),
            ({"floor_scale": 32}, 31),
            ({"attn_temperature_tuning": False, "attention_chunk_size": None}, 8191),
        ):
            set_config(folder, max_position_embeddings=1 << 20, **changes)
            assert shape_of(folder).context_length == context
            (folder / "config.json").write_text(before)
    finally:
        (folder / "config.json").write_text(before)


def test_maverick_does_not_normalise_q_and_k(folders: dict[str, Path]) -> None:
    folder, before = folders["llama4_text"], (folders["llama4_text"] / "config.json").read_text()
    try:
        set_config(folder, use_qk_norm=False)
        assert {getattr(layer.attention, "qk_norm") for layer in shape_of(folder).layers} == {"none"}  # noqa: B009
    finally:
        (folder / "config.json").write_text(before)


@pytest.mark.parametrize(
    ("model_type", "changes", "said"),
    [
        ("llama4_text", {"attention_bias": True}, "'attention_bias' is True"),
        ("llama4_text", {"moe_layers": [9]}, "'moe_layers' is"),
        ("llama4_text", {"no_rope_layers": [1, 0]}, "'no_rope_layers' is"),
        ("llama4_text", {"intermediate_size_mlp": None}, "'intermediate_size_mlp' is missing"),
        ("llama4_text", {"num_hidden_layers": "x"}, "'num_hidden_layers' is 'x'"),
        ("kimi_linear", {"layer_types": [FULL]}, "'layer_types' is"),
        ("kimi_linear", {"layer_types": None, "linear_attn_config": {"num_heads": 4, "full_attn_layers": [1],
         "kda_layers": [2, 3]}}, "each of the layers 1 to 4 is expected once"),
        ("kimi_linear", {"linear_attn_config": [1]}, "'linear_attn_config' is"),
        ("kimi_linear", {"linear_num_heads": 2}, "'num_heads' of linear attention is not"),
        ("kimi_linear", {"mla_use_nope": False}, "'mla_use_nope' is False"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "'moe_router_activation_func' is"),
        ("minimax_m3_vl", {"swiglu_alpha": 1.0}, "'swiglu_alpha' is 1.0"),
        ("minimax_m3_vl", {"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ("minimax_m3_vl", {"n_shared_experts": 2}, "'n_shared_experts' is 2"),
        ("minimax_m3_vl", {"layer_types": [FULL] * 3}, "are not those with experts"),
        ("minimax_m3_vl", {"sparse_attention_config": {"sparse_score_type": "mean"}}, "'sparse_score_type' is"),
        ("minimax_m3_vl", {"sparse_attention_config": {"sparse_disable_index_value": [0, 0, 0]}},
         "'sparse_disable_index_value' is 0"),
        ("mistral4", {"n_group": 2}, "'n_group' is 2"),
        ("mistral4", {"qk_rope_head_dim": 16}, "they do not agree"),
        ("mistral4", {"scoring_func": "tanh"}, "'scoring_func' is 'tanh'"),
        ("step3p7", {"query_pre_attn_scalar": 32}, "'query_pre_attn_scalar' is 32"),
        ("step3p7", {"use_rope_layers": [True, False, True, True]}, "'use_rope_layers' is"),
        ("step3p7", {"use_head_wise_attn_gate": False}, "'use_head_wise_attn_gate' is False"),
        ("step3p7", {"norm_expert_weight": False}, "'norm_expert_weight' is False"),
        ("step3p7", {"swiglu_limits": [1.0]}, "'swiglu_limits' is"),
        ("step3p7", {"swiglu_limits": [1.0, "x", 1.0, 1.0]}, "'swiglu_limits' is 'x'"),
        ("step3p7", {"mlp_layer_types": None, "moe_layers_enum": "1,x"}, "'moe_layers_enum' is"),
        ("step3p7", {"rope_parameters": None, "rope_theta": [1e4], "partial_rotary_factors": None}, "'rope_theta' is"),
        ("step3p7", {"rope_parameters": {FULL: {"rope_theta": 1e4, "partial_rotary_factor": 1.0}}},
         "'partial_rotary_factor' of full_attention is 1.0"),
        ("step3p7", {"rope_parameters": None, "rope_scaling": {"rope_type": "llama3"}, "yarn_only_types": [SLIDING]},
         "'yarn_only_types' is"),
        ("step3p7", {"num_sliding_attention_heads": None, "attention_other_setting": {"head_dim": 32}},
         "'head_dim' of sliding_attention is 32"),
        ("laguna", {"gating": "per-element"}, "'gating' is"),
        ("laguna", {"gating_types": ["per_element"] * 4}, "'gating' is"),
        ("laguna", {"num_attention_heads_per_layer": [4]}, "'num_attention_heads_per_layer' is"),
        ("laguna", {"moe_router_logit_softcapping": 30.0}, "'moe_router_logit_softcapping' is 30.0"),
        ("laguna", {"rope_parameters": {"rope_type": "default"}}, "'rope_parameters' is"),
        ("laguna", {"rope_parameters": {FULL: {"rope_theta": 1e4}, SLIDING: {"rope_theta": 1e4, "rope_type": "yarn"}}},
         "rope_type of sliding_attention is 'yarn'"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_would_be_computed_wrongly_are_refused(
    model_type: str, changes: dict[str, Any], said: str, folders: dict[str, Path]
) -> None:
    folder, before = folders[model_type], (folders[model_type] / "config.json").read_text()
    try:
        set_config(folder, **changes)
        with pytest.raises(ModelError, match=re.escape(said)):
            shape_of(folder)
    finally:
        (folder / "config.json").write_text(before)


def test_a_multimodal_model_around_another_text_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    config = {"model_type": "mistral3", "text_config": {"model_type": "phi3"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"model_type of 'text_config' is 'phi3'; in a mistral3 .*mistral4"):
        open_folder(tmp_path)
