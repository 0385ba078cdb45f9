"""Folders of models with vision of which the text alone is read, as they are published, beside transformers: GLM-4.1V,
GLM-OCR, EXAONE 4.5, Muse Glimmer, and Gemma 4's E2B and 12B."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from moeserve.models.open import open_folder
from moeserve.models.registry import read_checked_shape
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.weight_files import INDEX
from tests.kernels.engines.model_engine import Engine
from tests.kernels.families.transformers_logits import TOKENS
from tests.kernels.folders.folder_variants import assert_is_near_transformers, edit_config
from tests.kernels.operations import ISAS, stream_of
from tests.support.models.dense_families import DENSE_FAMILIES
from tests.support.models.folder_as_gguf import write_gguf
from tests.support.models.hugging_face_model import save_random
from tests.support.models.hugging_face_settings import FAMILIES, SETTINGS, VOCAB_ROWS

ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [4, 6, 6]}
VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4, "image_size": 16,
    "out_hidden_size": SETTINGS["hidden_size"],
}  # fmt: skip
HEAD_DIM = 64
GLM: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 192,
    "pad_token_id": 0,
    "rope_parameters": ROPE,
}
GEMMA: dict[str, Any] = FAMILIES["gemma4_text"][2] | {"enable_moe_block": False}
# model_type -> names of transformers' config and model, and the settings of the text and of vision.
FOLDERS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "glm4v": ("Glm4vConfig", "Glm4vForConditionalGeneration", GLM, {"out_hidden_size": 256}),
    "glm_ocr": (
        "GlmOcrConfig",
        "GlmOcrForConditionalGeneration",
        GLM | {"num_hidden_layers": 2},
        {"out_hidden_size": 256},
    ),
    "exaone4_5": (
        "Exaone4_5_Config",
        "Exaone4_5_ForConditionalGeneration",
        DENSE_FAMILIES["exaone4"][2] | {"model_type": "exaone4"},
        {"num_key_value_heads": 1, "fullatt_block_indexes": [0]},
    ),
    "muse_glimmer": (
        "MuseGlimmerConfig",
        "MuseGlimmerForConditionalGeneration",
        {
            "intermediate_size": 192, "head_dim": 64, "sliding_window": 17, "qk_scale_factor": 2.5, "pad_token_id": 0,
            "output_multiplier": 0.7, "final_logit_softcapping": 6.0, "num_hidden_layers": 4,
        },
        {"num_attention_heads": 2, "num_hidden_layers": 1},
    ),
    "gemma4": (
        "Gemma4Config",
        "Gemma4ForConditionalGeneration",
        GEMMA
        | {
            "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCAB_ROWS, "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True, "attention_k_eq_v": False,
        },
        {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16},
    ),
    "gemma4_unified": (
        "Gemma4UnifiedConfig",
        "Gemma4UnifiedForConditionalGeneration",
        {name: value for name, value in GEMMA.items() if name != "hidden_size_per_layer_input"},
        {"mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 128},
    ),
}  # fmt: skip


def write(folder: Path, model_type: str) -> Any:
    """Writes a model and returns transformers' class of it."""
    import transformers

    torch.manual_seed(7)
    config_name, model_name, text, vision = FOLDERS[model_type]
    model = getattr(transformers, model_name)
    text = SETTINGS | text
    config = getattr(transformers, config_name)(text_config=text, vision_config=VISION | vision)
    save_random(model(config), folder, torch.bfloat16)
    return model


@pytest.mark.parametrize("model_type", FOLDERS)
def test_the_text_is_what_transformers_computes(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write(tmp_path / "tiny", model_type)
    assert_is_near_transformers(tmp_path / "tiny", model, monkeypatch)


# What published checkpoints have besides, and the settings that say so: layers for further tokens, and k and v of
# layers that use an earlier layer's.
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "glm_ocr": ("model.language_model.layers.2.eh_proj.weight", {"num_nextn_predict_layers": 1}),
    "exaone4_5": ("mtp.layers.0.mlp.up_proj.weight", {"num_nextn_predict_layers": 1}),
    "gemma4": ("model.language_model.layers.3.self_attn.k_proj.weight", {}),
}


@pytest.mark.parametrize("model_type", MORE)
def test_what_is_published_besides_is_passed_over(model_type: str, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    write(folder, model_type)
    before = read_checked_shape(open_folder(folder))
    name, settings = MORE[model_type]
    save_file({name: torch.zeros(8, 8)}, folder / "more.safetensors")
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({"weight_map": index["weight_map"] | {name: "more.safetensors"}}))
    config = json.loads((folder / "config.json").read_text())
    edit_config(folder, text_config=config["text_config"] | settings)
    assert read_checked_shape(open_folder(folder)).layers == before.layers


def test_a_glm_file_with_three_positions_rotates_halves(tmp_path: Path) -> None:
    """llama.cpp's converter reorders the rows of q and k of GLM-4.1V from pairs to halves, and of no other GLM-4."""
    write(tmp_path / "tiny", "glm4v")

    def in_halves(name: str, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if ".attn_q." not in name and ".attn_k." not in name:
            return rows
        width = rows.dtype.itemsize * 2 if rows.ndim == 1 else 1  # a bias's numbers have two bytes
        by_head = rows.reshape(-1, HEAD_DIM, rows.shape[-1] if rows.ndim > 1 else width)
        rotated, rest = by_head[:, : HEAD_DIM // 2], by_head[:, HEAD_DIM // 2 :]
        halves = np.concatenate([rotated[:, 0::2], rotated[:, 1::2], rest], axis=1)
        return np.ascontiguousarray(halves).reshape(rows.shape)

    write_gguf(tmp_path / "tiny", tmp_path / "tiny.gguf", ordered=in_halves, without=(n.ROPE_HALVES,))
    file, folder = (
        Engine(stream_of(ISAS[0], threads=1), tmp_path / name).logits(TOKENS)
        for name in ("tiny.gguf", "tiny")
    )
    assert torch.equal(file, folder)
