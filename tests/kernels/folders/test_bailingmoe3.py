"""Ling 3 on the CPU engine: folders as they are published, limits of feed-forwards, rows alone and in a crowd, and what
is refused. Its logits beside transformers' and its next-token block: test_families.py, test_next_token_folder.py."""

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
from moeserve.models.next_token import with_next_token_block
from moeserve.models.open import open_folder, open_model
from moeserve.models.registry import read_checked_shape
from moeserve.worker.loading.cpu.load import load_cpu_runner
from tests.gpu.driver import Driver, small_config
from tests.kernels.engines.model_engine import Engine
from tests.kernels.operations import ISAS, stream_of
from tests.support.models.folder_as_gguf import write_gguf
from tests.support.models.hugging_face_model import write_family
from tests.support.models.next_token_folder import NextTokenFolder

TOKENS = [(37 * i * i + 11 * i) % 600 for i in range(40)]


def logits_of(path: Path) -> torch.Tensor:
    return Engine(stream_of(ISAS[-1]), path).logits(TOKENS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_family(tmp_path / "tiny", "bailing_hybrid")
    return tmp_path / "tiny"


def configure(folder: Path, **changes: Any) -> None:
    """Changes config.json; ... removes."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def rename(folder: Path, new_name: Callable[[str], str]) -> None:
    tensors = {
        new_name(name): t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()
    }
    for file in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        file.unlink()
    save_file(tensors, folder / "model.safetensors")


# The settings of https://huggingface.co/inclusionAI/Ling-3.0-tiny and its relatives beside the sizes.
PUBLISHED: dict[str, Any] = {
    "architectures": ["BailingMoeV3ForCausalLM"], "embedding_dropout": 0.0, "expert_swiglu_limit_list": None,
    "gated_attention_proj_granularity_type": "head_wise", "group_norm_size": 1, "head_dim": 64, "linear_silu": True,
    "max_window_layers": 20, "moe_router_enable_expert_bias": True, "moe_shared_expert_intermediate_size": 64,
    "mtp_use_kda": False, "no_kda_lora": True, "num_kv_heads_for_linear_attn": 0, "partial_rotary_factor": 0.5,
    "qk_head_dim": 64, "rope_interleave": True, "rotary_dim": 32, "router_dtype": "fp32", "scale_router_input": False,
    "score_function": "sigmoid", "scoring_func": "sigmoid", "seq_aux": True, "share_expert_swiglu_limit_list": None,
    "topk_method": "noaux_tc", "up_proj_norm": False, "use_bias": False, "use_kda_lora": False, "use_mla_nope": False,
    "use_nGPT": False, "use_qk_norm": True, "use_qkv_bias": False, "value_norm": False,
    "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 6000000, "rope_type": "default"},
    **dict.fromkeys(("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads"), ...),
}  # fmt: skip
_RENAMED = {
    "num_experts_per_token": "num_experts_per_tok", "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob", "model_max_length": "max_position_embeddings",
}  # fmt: skip


def test_a_folder_as_it_is_published(folder: Path) -> None:
    """Layers by the size of a group, and attention's output in two names."""
    expected = logits_of(folder)
    config = json.loads((folder / "config.json").read_text())
    renamed = {new: config[old] for old, new in _RENAMED.items()} | dict.fromkeys(_RENAMED, ...)
    width = config["moe_intermediate_size"]
    configure(folder, **PUBLISHED | renamed | {"moe_shared_expert_intermediate_size": width})
    rename(
        folder, lambda name: re.sub(r"layers\.([02])\.attention\.dense", r"layers.\1.attention.o_proj", name)
    )
    assert torch.equal(logits_of(folder), expected)


def test_layers_behind_the_last_whole_group_attend(folder: Path) -> None:
    configure(folder, layer_types=..., layer_group_size=3)
    with pytest.raises(ModelError, match="is missing"):  # of the second layer, which would be of another kind
        read_checked_shape(open_folder(folder))
    configure(folder, layer_types=["linear_attention", "full_attention"] * 2)
    assert [layer.attention is not None for layer in read_checked_shape(open_folder(folder)).layers] == [
        False, True, False, True,
    ]  # fmt: skip


def test_limits_of_late_layers(folder: Path, tmp_path: Path) -> None:
    """Published models were trained with them. A list may go on for the next-token layer, or end early."""
    expected = logits_of(folder)
    configure(
        folder, expert_swiglu_limit_list=[None, 0.0, 0.0, 1e4, 3.0], share_expert_swiglu_limit_list=[0.0]
    )
    found = logits_of(folder)
    assert torch.equal(found, expected)  # no number reaches 1e4
    configure(
        folder, expert_swiglu_limit_list=[0.0, 0.0, 0.01, 0.0], share_expert_swiglu_limit_list=[0.0, 0.02]
    )
    layers = read_checked_shape(open_folder(folder)).layers
    moes = [layer.moe for layer in layers[1:] if layer.moe is not None]
    assert [moe.limit for moe in moes] == pytest.approx([None, 0.01, None])
    assert [moe.shared and moe.shared.limit for moe in moes] == pytest.approx([0.02, None, None])
    found = logits_of(folder)
    assert not torch.allclose(found, expected, atol=1e-3)
    write_gguf(folder, tmp_path / "same.gguf")
    assert torch.equal(logits_of(tmp_path / "same.gguf"), found)


def test_limits_of_the_next_token_block(tmp_path: Path) -> None:
    """Its own, not those of the last layer, which it is like otherwise."""
    folder = NextTokenFolder(tmp_path, "bailing_hybrid", num_nextn_predict_layers=1).path
    for listed, limit in (([0.0, 0.0, 0.0, 7.0], None), ([0.0, 0.0, 0.0, 7.0, 5.0], 5.0)):
        configure(folder, expert_swiglu_limit_list=listed)
        source = open_folder(folder)
        shape = with_next_token_block(read_checked_shape(source), source)
        moes = [layer.moe for layer in shape.loaded_layers[3:] if layer.moe is not None]
        assert [moe.limit for moe in moes] == [7.0, limit]


def test_a_worker_gives_a_row_the_same_bits_alone_and_in_a_crowd(folder: Path) -> None:
    config = small_config(folder, device="cpu", threads=2, max_num_seqs=4, max_model_len=64)
    runner = load_cpu_runner(config, lambda *_: None)
    whole = Driver(runner).score(0, TOKENS, len(TOKENS))
    for chunk in (7, 33):
        assert Driver(runner).score(1, TOKENS, chunk) == whole
    expected = logits_of(folder).double().log_softmax(-1)
    assert [entry.logprob for entry in whole[: len(TOKENS) - 1]] == pytest.approx(
        [expected[i, token].item() for i, token in enumerate(TOKENS[1:])], abs=1e-4
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["BailingMoeV2_5ForCausalLM"]}, "only Ling 3 is supported"),
        ({"kda_safe_gate": False}, "'kda_safe_gate' is False"),
        ({"no_kda_lora": False}, "'no_kda_lora' is False"),
        ({"use_mla_nope": True}, "'use_mla_nope' is True"),
        ({"kda_lower_bound": 0.0}, "'kda_lower_bound' is 0.0; -1000 to -0.001"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "'rope_type' is 'yarn'"),
        ({"rope_parameters": ["yarn"]}, "'rope_type' is"),
        ({"layer_types": ["full_attention"]}, "'layer_types' is"),
        ({"layer_types": ["linear_attention"] * 4}, "has no attention layer"),
        ({"linear_head_dim": "64"}, "'linear_head_dim' is"),
        ({"expert_swiglu_limit_list": 7.0}, "'expert_swiglu_limit_list' is 7.0"),
        ({"expert_swiglu_limit_list": [0, -1]}, "'expert_swiglu_limit_list' is -1"),
        ({"qk_rope_head_dim": 31}, "an even number is supported"),
        ({"kv_lora_rank": 96}, "tensor"),
    ],
    ids=str,
)
def test_folders_that_would_be_computed_wrongly(folder: Path, changes: dict[str, Any], said: str) -> None:
    configure(folder, **changes)
    with pytest.raises(ModelError, match=said):
        read_checked_shape(open_folder(folder))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kda__gate_lower_bound": 7}, "gate_lower_bound"),
        ({"rope__dimension_count": 64}, "attention.key_length"),
        ({"attention__key_length_mla": 16}, "attention.key_length_mla"),
    ],
    ids=str,
)
def test_files_that_would_be_computed_wrongly(folder: Path, settings: dict[str, int], said: str) -> None:
    write_gguf(folder, folder.parent / "m.gguf", **settings)
    source = open_model(folder.parent / "m.gguf")
    with pytest.raises(ModelError, match=said):
        read_checked_shape(source)
