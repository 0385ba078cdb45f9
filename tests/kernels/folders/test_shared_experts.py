"""Folders of Ling 1 and DeepSeekMoE, beside transformers' Qwen2-MoE, whose shared expert's gate is 1/2 here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeserve.models.errors import ModelError
from moeserve.models.open import open_folder
from moeserve.models.registry import family_of_config
from moeserve.models.sources.huggingface import made_tensor
from tests.kernels.engines.model_engine import Engine
from tests.kernels.families.transformers_logits import TOKENS, transformers_logits
from tests.kernels.folders.folder_variants import edit_config
from tests.kernels.operations import ISAS, stream_of
from tests.support.models.hugging_face_model import write_qwen2_moe

DEEPSEEK = {
    "architectures": ["DeepseekForCausalLM"],
    "model_type": "deepseek",
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "rope_scaling": None,
    "rope_theta": 600000.0,
    "scoring_func": "softmax",
}
SETTINGS = {
    "architectures": ["BailingMoeForCausalLM"],
    "model_type": "bailing_moe",
    "first_k_dense_replace": 0,
    "num_shared_experts": 2,
    "norm_head": False,
    "norm_softmax": False,
    "use_bias": False,
    "use_qkv_bias": False,
    "rope_scaling": None,
    "rope_theta": 600000.0,
}
FOREIGN = (
    *("shared_expert_intermediate_size", "qkv_bias", "decoder_sparse_step", "rope_parameters"),
    "mlp_only_layers",
)


def write_folders(folder: Path, truth: Path, settings: dict[str, Any], **changes: Any) -> None:
    """A model of these settings in `folder`, and in `truth` the Qwen2-MoE whose logits it has."""
    rope = {"rope_type": "default", "rope_theta": settings["rope_theta"]}
    own = {"shared_expert_intermediate_size": 192, "moe_intermediate_size": 96, "qkv_bias": False}
    write_qwen2_moe(truth, torch.float32, rope_parameters=rope, **own, **changes)
    weights = whole(truth)
    for name in weights:
        if name.endswith("shared_expert_gate.weight"):
            weights[name] = torch.zeros_like(weights[name])  # a sigmoid of one half
    save_file(weights, truth / "model.safetensors", metadata={"format": "pt"})
    folder.mkdir()
    for file in truth.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    ours = renamed(weights, is_ling=settings is SETTINGS)
    save_file(ours, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((truth / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in FOREIGN}
    (folder / "config.json").write_text(json.dumps(config | settings))


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of all files, and removes the files."""
    weights: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors*"):
        if file.suffix == ".safetensors":
            weights |= load_file(file)
        file.unlink()
    return weights


def renamed(weights: dict[str, torch.Tensor], *, is_ling: bool) -> dict[str, torch.Tensor]:
    ours = {}
    for name, value in weights.items():
        if "shared_expert_gate" in name or (is_ling and (".k_proj" in name or ".v_proj" in name)):
            continue
        new = name.replace("mlp.shared_expert.", "mlp.shared_experts.")
        if is_ling:
            new = new.replace("embed_tokens", "word_embeddings").replace(
                "self_attn.o_proj", "attention.dense"
            )
        if is_ling and ".q_proj" in name:
            new = new.replace("self_attn.q_proj", "attention.query_key_value")
            value = torch.cat([weights[name.replace("q_proj", f"{part}_proj")] for part in "qkv"])
        ours[new] = value / 2 if "shared_experts.down_proj" in new else value.contiguous()
    return ours


@pytest.fixture
def ling(tmp_path: Path) -> tuple[Path, Path]:
    write_folders(tmp_path / "ling", tmp_path / "truth", SETTINGS, norm_topk_prob=True)
    return tmp_path / "ling", tmp_path / "truth"


def logits_of(folder: Path) -> torch.Tensor:
    return Engine(stream_of(ISAS[0], threads=1), folder).logits(TOKENS)


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        (SETTINGS, {"norm_topk_prob": True}),
        (DEEPSEEK, {"norm_topk_prob": False, "mlp_only_layers": [0], "num_experts": 8}),
    ],
    ids=["Ling 1", "DeepSeekMoE"],
)
def test_a_folder_is_what_transformers_computes(
    settings: dict[str, Any], changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen2MoeForCausalLM

    folder, truth = tmp_path / "tiny", tmp_path / "truth"
    write_folders(folder, truth, settings, **changes)
    model = Qwen2MoeForCausalLM.from_pretrained(truth, dtype=torch.float32)
    expected = transformers_logits(model, monkeypatch)
    logits = logits_of(folder)
    errors = ((logits - expected) ** 2).mean(-1) / (expected**2).mean()
    assert errors.median() < 1e-6
    assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9


def test_columns_of_plus_output_matrix_have_length_one(ling: tuple[Path, Path]) -> None:
    folder, _ = ling
    weights = load_file(folder / "model.safetensors")
    head = weights["lm_head.weight"]
    weights["lm_head.weight"] = head / (head.norm(dim=0) + 1e-7)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    expected = logits_of(folder)
    lengths = 1 + torch.arange(head.shape[1]) % 7
    weights["lm_head.weight"] = (weights["lm_head.weight"] * lengths).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert not torch.allclose(logits_of(folder), expected, atol=0.1)
    edit_config(folder, norm_head=True)
    torch.testing.assert_close(logits_of(folder), expected, atol=1e-5, rtol=1e-5)
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"'lm_head\.weight' is missing"):
        open_folder(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_divided_output_matrix_keeps_its_type(
    dtype: torch.dtype, ling: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = ling
    weights = load_file(folder / "model.safetensors")
    head = weights["lm_head.weight"]
    head = (head * (1 + torch.arange(head.shape[1]) % 7)).to(dtype)
    save_file(weights | {"lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, norm_head=True)
    monkeypatch.setattr(made_tensor, "_ROWS_AT_ONCE", 48)  # several blocks, and a smaller one at the end
    made = open_folder(folder).data("output.weight").copy()
    expected = (head.double() / head.double().norm(dim=0)).to(dtype)
    got = torch.from_numpy(made).view(dtype).view(head.shape)  # of the same number of bytes
    torch.testing.assert_close(got, expected, atol=1e-7, rtol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("has_equal_head", [False, True])
def test_an_embedding_as_the_divided_output_matrix_is_refused(
    has_equal_head: bool, ling: tuple[Path, Path]
) -> None:
    folder, _ = ling
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    if has_equal_head:
        weights["lm_head.weight"] = weights["model.word_embeddings.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, tie_word_embeddings=True)
    open_folder(folder)
    edit_config(folder, norm_head=True)
    with pytest.raises(ModelError, match="'norm_head' is True; with the embedding as the output matrix"):
        open_folder(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"first_k_dense_replace": 1}, "'first_k_dense_replace' is 1"),
        ({"multi_gate": True}, "'multi_gate' is True"),
        ({"use_qkv_bias": True}, "'use_qkv_bias' is True"),
    ],
    ids=str,
)
def test_variants_that_would_be_computed_wrongly_are_refused(
    changes: dict[str, Any], said: str, ling: tuple[Path, Path]
) -> None:
    edit_config(ling[0], **changes)
    with pytest.raises(ModelError, match=said):
        logits_of(ling[0])


@pytest.mark.parametrize(
    ("architectures", "expected"),
    [
        (["BailingMoeForCausalLM"], "bailingmoe"),
        (["BailingMoeV2ForCausalLM"], "bailingmoe2"),
        (None, "bailingmoe2"),
        ("BailingMoeForCausalLM", "bailingmoe2"),
        ([{}, 1], "bailingmoe2"),
    ],
)
def test_architectures_tell_ling_1_from_ling_2(architectures: Any, expected: str) -> None:
    family, _ = family_of_config(
        Path("config.json"), {"model_type": "bailing_moe", "architectures": architectures}
    )
    assert family.architecture == expected
