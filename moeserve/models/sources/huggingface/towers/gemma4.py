"""Gemma 4."""

from __future__ import annotations

import re
from typing import Final

from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.made_tensor import values_made
from moeserve.models.sources.huggingface.safetensors_file import StoredTensor
from moeserve.models.sources.huggingface.wrapped_text import TEXT_CONFIG

from .family import Config, Made, TowerFamily

_PATCH: Final = "patch_embedder.input_proj.weight"  # [hidden, row x column x channel]


def _made(name: str, tensor: StoredTensor, vision: Config) -> Made:
    shape = tensor.shape
    if name == _PATCH and len(shape) == 2 and (side := _patch_side(shape[1])):
        split, ours = (shape[0], side, side, 3), (shape[0], 3, side, side)
        yield (
            "v.patch_embd.weight",
            values_made(tensor, ours, lambda v: v.reshape(split).transpose(0, 3, 1, 2)),
        )


def _patch_side(numbers: int) -> int:
    """Returns the side of a square patch of three channels in pixels; 0 if there is none."""
    side = round((numbers / 3) ** 0.5)
    return side if 3 * side * side == numbers else 0


def text_width(config: Config, vision: Config) -> dict[str, MetadataValue]:
    """Returns the width of the tower's embeddings, which is the text model's width."""
    text = config.get(TEXT_CONFIG)
    if isinstance(text, dict) and isinstance(text.get("hidden_size"), int):
        return {"clip.vision.projection_dim": text["hidden_size"]}
    return {}


FAMILY: Final = TowerFamily(
    name="Gemma 4",
    model_types=("gemma4_vision",),
    projector="gemma4v",
    keys={
        "block_count": ("num_hidden_layers",),
        "embedding_length": ("hidden_size",),
        "feed_forward_length": ("intermediate_size",),
        "attention.head_count": ("num_attention_heads",),
        "attention.layer_norm_epsilon": ("rms_norm_eps",),
        "patch_size": ("patch_size",),
        "projector.scale_factor": ("pooling_kernel_size",),
    },
    fixed={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
    prefixes=("model.vision_tower.", "vision_tower.", "model.embed_vision.", "embed_vision."),
    names={
        "patch_embedder.position_embedding_table": "v.position_embd.weight",
        "embedding_projection": "mm.input_projection",
        "std_bias": "v.std_bias",
        "std_scale": "v.std_scale",
    },
    layer=re.compile(r"encoder\.layers\.(\d{1,3})\.(.*)"),
    layer_names={
        "input_layernorm": "ln1",
        "post_attention_layernorm": "attn_post_norm",
        "pre_feedforward_layernorm": "ln2",
        "post_feedforward_layernorm": "ffn_post_norm",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_out",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    },
    pixels=((0.0,) * 3, (1.0,) * 3),
    made=_made,
    derived=text_width,
)
