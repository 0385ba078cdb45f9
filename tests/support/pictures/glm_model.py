"""A tiny GLM-4.6V or GLM-4.1V with random weights: transformers' folder, which has the publisher's names, and its
mmproj file as llama.cpp's converter writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch

from tests.support.models.hugging_face_model import write_wrapped
from tests.support.models.hugging_face_settings import SETTINGS
from tests.support.pictures.tower_writer import Tensors, write_mmproj

HIDDEN, HEADS, LAYERS, MERGER, PATCH, MERGE, SIDE = 32, 2, 2, 80, 4, 2, 6
IMAGE, VIDEO, START, END = 1, 2, 3, 4  # tokens
MEAN, DEVIATION = [0.5, 0.4, 0.3], [0.25, 0.3, 0.35]
_NAMES: Final = {
    "patch_embed.proj.bias": "v.patch_embd.bias",
    "post_conv_layernorm.weight": "v.norm_embd.weight",
    "embeddings.position_embedding.weight": "v.position_embd.weight",
    "post_layernorm.weight": "v.post_ln.weight",
    "downsample.weight": "mm.patch_merger.weight",
    "downsample.bias": "mm.patch_merger.bias",
    "merger.proj.weight": "mm.model.fc.weight",
    "merger.post_projection_norm.weight": "mm.post_norm.weight",
    "merger.post_projection_norm.bias": "mm.post_norm.bias",
    "merger.gate_proj.weight": "mm.gate.weight",
    "merger.up_proj.weight": "mm.up.weight",
    "merger.down_proj.weight": "mm.down.weight",
}
_LAYER: Final = {
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_model(folder: Path, *, has_experts: bool = True) -> Any:
    """Writes the folder and `mmproj.gguf` beside it. has_experts: as in GLM-4.6V; False: a GLM-4.1V. Returns
    transformers' model, float32."""
    import transformers

    torch.manual_seed(7)
    name = "Glm4vMoe" if has_experts else "Glm4v"
    text = {key: value for key, value in SETTINGS.items() if key != "num_experts"} | {
        "head_dim": 64, "intermediate_size": 224, "n_routed_experts": 8, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "attention_bias": True,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [4, 6, 6],
        },
    }  # fmt: skip
    vision = {
        "depth": LAYERS, "hidden_size": HIDDEN, "intermediate_size": MERGER, "num_heads": HEADS, "patch_size": PATCH,
        "image_size": SIDE * PATCH, "spatial_merge_size": MERGE, "out_hidden_size": SETTINGS["hidden_size"],
        "initializer_range": 0.15,
    }  # fmt: skip
    if not has_experts:  # heads are as wide as their number makes them
        text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO,
        image_start_token_id=START, image_end_token_id=END,
    )  # fmt: skip
    model: Any = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    model.eval()
    write_wrapped(model, folder)
    processor = {"image_mean": MEAN, "image_std": DEVIATION, "patch_size": PATCH, "merge_size": MERGE}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    write_mmproj(folder.with_name("mmproj.gguf"), _settings(), _mmproj(model))
    return model


def _mmproj(model: Any) -> Tensors:
    weights = model.model.visual.state_dict()
    made = {ours: weights[theirs] for theirs, ours in _NAMES.items()}
    for time, name in enumerate(("v.patch_embd.weight", "v.patch_embd.weight.1")):
        made[name] = weights["patch_embed.proj.weight"][:, :, time]
    for layer in range(LAYERS):
        for theirs, ours in _LAYER.items():
            made[f"v.blk.{layer}.{ours}.weight"] = weights[f"blocks.{layer}.{theirs}.weight"]
    return made


def _settings() -> dict[str, Any]:
    return {
        "clip.has_vision_encoder": True, "clip.projector_type": "glm4v", "clip.use_silu": True,
        "clip.vision.image_size": SIDE * PATCH, "clip.vision.patch_size": PATCH,
        "clip.vision.embedding_length": HIDDEN, "clip.vision.feed_forward_length": MERGER,
        "clip.vision.projection_dim": SETTINGS["hidden_size"], "clip.vision.block_count": LAYERS,
        "clip.vision.attention.head_count": HEADS, "clip.vision.attention.layer_norm_epsilon": 1e-5,
        "clip.vision.image_mean": MEAN, "clip.vision.image_std": DEVIATION,
    }  # fmt: skip
