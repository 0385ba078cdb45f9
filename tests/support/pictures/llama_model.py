"""A tiny Llama 4 with random weights: transformers' folder, which has the publisher's names, and its mmproj file as
llama.cpp's converter writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch

from tests.support.models.hugging_face_model import write_wrapped
from tests.support.models.hugging_face_settings import SETTINGS
from tests.support.models.newest_families import NEWEST
from tests.support.pictures.tower_writer import Tensors, randomize, write_mmproj

HIDDEN, HEADS, LAYERS, FFN, PATCH, MERGE, TILE = 32, 2, 2, 128, 4, 2, 24
IMAGE = 1  # token
_LAYER: Final = {
    "input_layernorm": "ln1",
    "post_attention_layernorm": "ln2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_out",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
_NAMES: Final = {
    "patch_embedding.linear.weight": "v.patch_embd.weight",
    "class_embedding": "v.class_embd",
    "positional_embedding_vlm": "v.position_embd.weight",
    "layernorm_pre.weight": "v.pre_ln.weight",
    "layernorm_pre.bias": "v.pre_ln.bias",
    "layernorm_post.weight": "v.post_ln.weight",
    "layernorm_post.bias": "v.post_ln.bias",
    "vision_adapter.mlp.fc1.weight": "mm.model.mlp.1.weight",
    "vision_adapter.mlp.fc2.weight": "mm.model.mlp.2.weight",
}


def write_model(folder: Path) -> Any:
    """Writes the folder and `mmproj.gguf` beside it. Returns transformers' model, float32."""
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    torch.manual_seed(7)
    vision = {
        "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "intermediate_size": FFN,
        "patch_size": PATCH, "image_size": TILE, "projector_input_dim": 48, "projector_output_dim": 48,
        "vision_output_dim": 48,
    }  # fmt: skip
    text = SETTINGS | NEWEST["llama4_text"][2]
    config = Llama4Config(
        text_config=text, vision_config=vision, image_token_index=IMAGE, tie_word_embeddings=False
    )
    model: Any = Llama4ForConditionalGeneration(config)
    model.eval()
    randomize(model.vision_model, 3)
    randomize(model.multi_modal_projector, 4)
    rotary = model.vision_model.rotary_embedding
    turns = rotary.freqs_ci.clone()
    write_wrapped(model, folder)
    rotary.freqs_ci = turns  # complex numbers, which a change of type cuts
    processor = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "max_patches": 16}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    write_mmproj(folder.with_name("mmproj.gguf"), _settings(), _mmproj(model))
    return model


def _mmproj(model: Any) -> Tensors:
    weights = model.vision_model.state_dict()
    made = {ours: weights[theirs] for theirs, ours in _NAMES.items()}
    made["mm.model.fc.weight"] = model.multi_modal_projector.linear_1.weight
    for layer in range(LAYERS):
        for theirs, ours in _LAYER.items():
            for part in ("weight", "bias"):
                made[f"v.blk.{layer}.{ours}.{part}"] = weights[f"model.layers.{layer}.{theirs}.{part}"]
    return made


def _settings() -> dict[str, Any]:
    return {
        "clip.has_vision_encoder": True, "clip.projector_type": "llama4", "clip.use_gelu": True,
        "clip.vision.image_size": TILE, "clip.vision.patch_size": PATCH, "clip.vision.embedding_length": HIDDEN,
        "clip.vision.feed_forward_length": FFN, "clip.vision.projection_dim": SETTINGS["hidden_size"],
        "clip.vision.block_count": LAYERS, "clip.vision.attention.head_count": HEADS,
        "clip.vision.attention.layer_norm_epsilon": 1e-5, "clip.vision.projector.scale_factor": MERGE,
        "clip.vision.image_mean": [0.5] * 3, "clip.vision.image_std": [0.5] * 3,
    }  # fmt: skip
