"""Folders of DeepSeek-V4: beside transformers, as it writes them and in the published form, in 8 and 4 bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeserve.models.errors import ModelError
from moeserve.models.open import open_folder
from moeserve.models.registry import read_checked_shape
from tests.kernels.engines.model_engine import Engine, distance
from tests.kernels.operations import ISAS, stream_of
from tests.support.models.deepseek4_model import RATIOS, YARN, logits, new_model
from tests.support.models.hugging_face_model import tokenizer_files

TOKENS = [(37 * i * i + 11 * i) % 600 for i in range(90)]
Tensors = dict[str, torch.Tensor]


def written(folder: Path, model: Any) -> Tensors:
    """Writes the model as transformers does, with a tokenizer. Returns its tensors."""
    model.save_pretrained(folder)
    for name, content in tokenizer_files().items():
        (folder / name).write_bytes(content)
    return load_file(folder / "model.safetensors")


def set_config(folder: Path, **changes: object) -> None:
    """Changes config.json; ... removes."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def published(tensors: Tensors) -> Tensors:
    """Returns the tensors under the names that DeepSeek gives them."""
    names = {
        name: name.removeprefix("model.")
        .replace("embed_tokens.", "embed.")
        .replace("attn.norm.", "attn.kv_norm.")
        .replace("hc_head.hc_", "hc_head_")
        for name in tensors
    }
    return {names[name]: tensor.contiguous() for name, tensor in tensors.items()}


OLD_CONFIG: dict[str, object] = {
    "layer_types": ..., "mlp_layer_types": ..., "compress_rates": ..., "rope_parameters": ...,
    "partial_rotary_factor": ...,
    "compress_ratios": [*RATIOS, 0], "num_hash_layers": 1, "num_nextn_predict_layers": 1, "qk_rope_head_dim": 16,
    "rope_scaling": {"type": "yarn", **{name: value for name, value in YARN.items() if name != "rope_type"}},
}  # fmt: skip


@pytest.mark.parametrize("is_published", [False, True])
def test_near_to_transformers(is_published: bool, tmp_path: Path) -> None:
    model = new_model(5, rope_parameters=dict(YARN))
    tensors = written(tmp_path, model)
    if is_published:
        draft = {"mtp.0.norm.weight": torch.ones(4)}
        save_file(published(tensors) | draft, tmp_path / "model.safetensors")
        set_config(tmp_path, **OLD_CONFIG)
    kl, agrees = distance(logits(model, TOKENS), Engine(stream_of(ISAS[0]), tmp_path).logits(TOKENS))
    assert kl.median() < 1e-5
    assert agrees.double().mean() > 0.97


FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def in_eight_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns 8-bit floats, the scales of their blocks of 128 x 128 as bytes, and what both mean."""
    rows, cols = weight.shape
    scales = torch.zeros(-(-rows // 128), -(-cols // 128), dtype=torch.int32)
    codes, values = torch.empty(rows, cols, dtype=torch.float8_e4m3fn), torch.empty(rows, cols)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            exponent = int(torch.ceil(torch.log2(weight[part].abs().max() / 448)))
            scales[i, j] = exponent + 127
            codes[part] = (weight[part] / 2.0**exponent).to(torch.float8_e4m3fn)
            values[part] = codes[part].float() * 2.0**exponent
    return codes, scales.to(torch.uint8).view(torch.float8_e8m0fnu), values


def in_four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns 4-bit floats, two a byte, the scales of 32 columns, and what both mean."""
    groups = weight.view(weight.shape[0], -1, 32)
    exponents = torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True) / 6))
    scaled = groups / 2.0**exponents
    codes = (scaled.abs()[..., None] - FP4_VALUES).abs().argmin(-1)
    values = FP4_VALUES[codes] * scaled.sign() * 2.0**exponents
    nibbles = (codes | (scaled < 0).long() << 3).view(weight.shape)
    packed = (nibbles[:, ::2] | nibbles[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    scales = (exponents[..., 0] + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return packed, scales, values.view(weight.shape)


def test_the_published_form_in_8_and_4_bits(tmp_path: Path) -> None:
    """Matrices of attention and shared experts in blocks of 8-bit floats, experts in 4 bits, the rest in 16."""
    model = new_model(6, rope_parameters=dict(YARN))
    stored, meant = Tensors(), Tensors()
    for name, weight in published(written(tmp_path, model)).items():
        if ".experts." in name:
            stored[name], stored[name.replace(".weight", ".scale")], meant[name] = in_four_bits(weight)
        elif ".attn.w" in name or "shared_experts" in name or "indexer.wq_b" in name:
            stored[name], stored[name.replace(".weight", ".scale")], meant[name] = in_eight_bits(weight)
        else:
            stored[name] = meant[name] = weight
    save_file(meant, tmp_path / "model.safetensors")
    read = type(model).from_pretrained(tmp_path, attn_implementation="eager", experts_implementation="eager")
    save_file(stored, tmp_path / "model.safetensors")
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    }
    set_config(tmp_path, **OLD_CONFIG, quantization_config=quantization, expert_dtype="fp4")
    source = open_folder(tmp_path)
    assert source.tensors["blk.1.ffn_gate_exps.weight"].type.name == "MXFP4"
    assert source.tensors["blk.1.attn_q_b.weight"].type.name.startswith("FP8")
    kl, agrees = distance(
        logits(read.eval().float(), TOKENS), Engine(stream_of(ISAS[0]), tmp_path).logits(TOKENS)
    )
    print(f"median KL {kl.median():.2e}, top-1 {agrees.double().mean():.1%}")
    assert kl.median() < 1e-3
    assert agrees.double().mean() > 0.9


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"scoring_func": "sigmoid"}, "'scoring_func' is 'sigmoid'"),
        ({"layer_types": ["full_attention"] * 3}, "'layer_types' is"),
        ({"layer_types": ..., "compress_ratios": [0, 4]}, "'layer_types' is None"),
        ({"mlp_layer_types": ["moe", "hash_moe", "moe"]}, "'hash_moe' is supported in the first layers"),
        ({"compress_rates": {"compressed_sparse_attention": "4"}}, "'compress_rates' is"),
        ({"swiglu_limit": "none"}, "'swiglu_limit' is 'none'"),
        ({"rope_parameters": ..., "rope_scaling": [1]}, "'rope_scaling' is"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, changes: dict[str, object], cause: str) -> None:
    written(tmp_path, new_model(5))
    set_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=cause):
        read_checked_shape(open_folder(tmp_path))
