"""A tiny MiniMax-M3 with random weights: a folder under the publisher's names, and its mmproj file as llama.cpp's
converter writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file

from tests.support.models.hugging_face_model import write_wrapped
from tests.support.models.hugging_face_settings import SETTINGS
from tests.support.models.newest_families import NEWEST
from tests.support.pictures.tower_writer import Tensors, add_to_folder, write_mmproj

HIDDEN, HEADS, LAYERS, FFN, INNER, PATCH, MERGE = 40, 2, 2, 48, 56, 4, 2  # heads of 20, of which 18 rotate
IMAGE = 1  # token
MEAN, DEVIATION = [0.5, 0.4, 0.3], [0.25, 0.3, 0.35]
_LAYER: Final = {
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
_PROJECTOR: Final = {
    "linear_1": ("multi_modal_projector.linear_1", "mm.1"),
    "linear_2": ("multi_modal_projector.linear_2", "mm.2"),
    "merge_linear_1": ("patch_merge_mlp.linear_1", "mm.merger.fc1"),
    "merge_linear_2": ("patch_merge_mlp.linear_2", "mm.merger.fc2"),
}
_PARTS: Final = ("weight", "bias")


def write_model(folder: Path) -> Any:
    """Writes the folder and `mmproj.gguf` beside it. Returns transformers' model, float32."""
    from transformers import MiniMaxM3SparseForConditionalGeneration, MiniMaxM3VLConfig

    torch.manual_seed(7)
    vision = {
        "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "patch_size": PATCH, "image_size": 64, "spatial_merge_size": MERGE, "initializer_range": 0.2,
    }  # fmt: skip
    text = SETTINGS | NEWEST["minimax_m3_vl"][2]
    config = MiniMaxM3VLConfig(
        text_config=text, vision_config=vision, image_token_index=IMAGE, projector_hidden_size=INNER,
        tie_word_embeddings=False,
    )  # fmt: skip
    model: Any = MiniMaxM3SparseForConditionalGeneration(config)
    model.eval()
    write_wrapped(model, folder)
    _publish(folder, model)
    write_mmproj(folder.with_name("mmproj.gguf"), _settings(), _mmproj(model))
    return model


def _publish(folder: Path, model: Any) -> None:
    """Writes the tower under the publisher's names and settings."""
    stored: Tensors = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
        file.unlink()
    text = {
        name: each for name, each in stored.items() if "vision_tower" not in name and "_projector" not in name
    }
    text = {name: each for name, each in text.items() if "patch_merge_mlp" not in name}
    weights, published = model.model.state_dict(), "vision_tower.vision_model."
    made = {f"{published}embeddings.patch_embedding.weight": weights["vision_tower.embeddings.proj.weight"]}
    for part in _PARTS:
        made[f"{published}pre_layrnorm.{part}"] = weights[f"vision_tower.pre_layrnorm.{part}"]
        for ours, (theirs, _) in _PROJECTOR.items():
            made[f"{theirs}.{part}"] = weights[f"multi_modal_projector.{ours}.{part}"]
        for layer in range(LAYERS):
            for name in _LAYER:
                made[f"{published}encoder.layers.{layer}.{name}.{part}"] = weights[
                    f"vision_tower.layers.{layer}.{name}.{part}"
                ]
    vision = {
        "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": FFN,
        "patch_size": PATCH, "image_size": 64, "projection_dim": SETTINGS["hidden_size"], "rope_theta": 10000.0,
        "rope_mode": "3d", "layer_norm_eps": 1e-5, "hidden_act": "gelu", "model_type": "clip_vision_model",
        "num_channels": 3, "img_token_compression_config": {"spatial_merge_size": MERGE, "temporal_patch_size": 2},
    }  # fmt: skip
    add_to_folder(folder, text | made, vision_config=vision)
    processor = {"image_mean": MEAN, "image_std": DEVIATION, "size": [672, 672]}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def _mmproj(model: Any) -> Tensors:
    weights, made = model.model.state_dict(), {}
    for time, name in enumerate(("v.patch_embd.weight", "v.patch_embd.weight.1")):
        made[name] = weights["vision_tower.embeddings.proj.weight"][:, :, time]
    for part in _PARTS:
        made[f"v.pre_ln.{part}"] = weights[f"vision_tower.pre_layrnorm.{part}"]
        for theirs, (_, ours) in _PROJECTOR.items():
            made[f"{ours}.{part}"] = weights[f"multi_modal_projector.{theirs}.{part}"]
        for layer in range(LAYERS):
            for theirs, ours in _LAYER.items():
                values = weights[f"vision_tower.layers.{layer}.{theirs}.{part}"]
                made[f"v.blk.{layer}.{ours}.{part}"] = (
                    _axes_apart(values) if ours in ("attn_q", "attn_k") else values
                )
    return made


def _axes_apart(values: torch.Tensor) -> torch.Tensor:
    """From [Ta Ha Wa Tb Hb Wb rest] of each head to [Ta Tb Ha Hb Wa Wb rest]; each of three."""
    heads = values.view(HEADS, -1, *values.shape[1:])
    order = [0, 1, 2, 9, 10, 11, 3, 4, 5, 12, 13, 14, 6, 7, 8, 15, 16, 17, 18, 19]
    return heads[:, order].reshape(values.shape)


def _settings() -> dict[str, Any]:
    return {
        "clip.has_vision_encoder": True, "clip.projector_type": "minimax_m3", "clip.use_gelu": True,
        "clip.vision.image_size": 64, "clip.vision.patch_size": PATCH, "clip.vision.embedding_length": HIDDEN,
        "clip.vision.feed_forward_length": FFN, "clip.vision.projection_dim": SETTINGS["hidden_size"],
        "clip.vision.block_count": LAYERS, "clip.vision.attention.head_count": HEADS,
        "clip.vision.attention.layer_norm_epsilon": 1e-5, "clip.vision.spatial_merge_size": MERGE,
        "clip.vision.image_mean": MEAN, "clip.vision.image_std": DEVIATION,
    }  # fmt: skip
