"""A tiny Gemma 3 with vision and random weights: transformers' folder, which has the publisher's names, and its mmproj
file as llama.cpp's converter writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch

from tests.support.models.hugging_face_model import write_wrapped
from tests.support.models.hugging_face_settings import FAMILIES, SETTINGS
from tests.support.pictures.tower_writer import Tensors, add_to_folder, randomize, write_mmproj

# Four tokens a side, each of 2 x 2 patches.
HIDDEN, HEADS, LAYERS, FFN, PATCH, MERGE, SIDE = 36, 3, 2, 80, 4, 2, 32
TOKENS: Final = (SIDE // PATCH // MERGE) ** 2
IMAGE = 1  # token
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
_NAMES: Final = {
    "embeddings.patch_embedding.weight": "v.patch_embd.weight",
    "embeddings.patch_embedding.bias": "v.patch_embd.bias",
    "embeddings.position_embedding.weight": "v.position_embd.weight",
    "post_layernorm.weight": "v.post_ln.weight",
    "post_layernorm.bias": "v.post_ln.bias",
}
_SWAPPED: Final = {"mlp.fc1": "ffn_down", "mlp.fc2": "ffn_up"}  # an older converter's names


def write_model(folder: Path) -> Any:
    """Writes the folder, and beside it `mmproj.gguf` and `mmproj-swapped.gguf`, which an older converter wrote. Returns
    transformers' model, float32."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    torch.manual_seed(7)
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": HIDDEN, "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS, "intermediate_size": FFN, "patch_size": PATCH, "image_size": SIDE,
        "vision_use_head": False,
    }  # fmt: skip
    config = Gemma3Config(
        text_config=SETTINGS | FAMILIES["gemma3_text"][2], vision_config=vision, image_token_index=IMAGE,
        mm_tokens_per_image=TOKENS,
    )  # fmt: skip
    model: Any = Gemma3ForConditionalGeneration(config)
    model.eval()
    randomize(model.model.vision_tower, 3)
    randomize(model.model.multi_modal_projector, 4)
    write_wrapped(model, folder)
    # The published file leaves the rest out.
    add_to_folder(folder, {}, vision_config=vision)
    processor = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_pan_and_scan": None}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    write_mmproj(folder.with_name("mmproj.gguf"), _settings(), _mmproj(model, _LAYER))
    write_mmproj(folder.with_name("mmproj-swapped.gguf"), _settings(), _mmproj(model, _LAYER | _SWAPPED))
    return model


def _mmproj(model: Any, layer_names: dict[str, str]) -> Tensors:
    weights = {
        name.removeprefix("vision_model."): values
        for name, values in model.model.vision_tower.state_dict().items()
    }
    made = {ours: weights[theirs] for theirs, ours in _NAMES.items()}
    projector = model.model.multi_modal_projector
    made["mm.input_projection.weight"] = projector.mm_input_projection_weight
    made["mm.soft_emb_norm.weight"] = projector.mm_soft_emb_norm.weight + 1
    for layer in range(LAYERS):
        for theirs, ours in layer_names.items():
            for part in ("weight", "bias"):
                made[f"v.blk.{layer}.{ours}.{part}"] = weights[f"encoder.layers.{layer}.{theirs}.{part}"]
    return made


def _settings() -> dict[str, Any]:
    return {
        "clip.has_vision_encoder": True, "clip.projector_type": "gemma3", "clip.use_gelu": True,
        "clip.vision.image_size": SIDE, "clip.vision.patch_size": PATCH, "clip.vision.embedding_length": HIDDEN,
        "clip.vision.feed_forward_length": FFN, "clip.vision.projection_dim": SETTINGS["hidden_size"],
        "clip.vision.block_count": LAYERS, "clip.vision.attention.head_count": HEADS,
        "clip.vision.attention.layer_norm_epsilon": 1e-6, "clip.vision.projector.scale_factor": MERGE,
        "clip.vision.image_mean": [0.5] * 3, "clip.vision.image_std": [0.5] * 3,
    }  # fmt: skip
