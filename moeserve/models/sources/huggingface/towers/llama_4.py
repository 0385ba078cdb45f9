"""Llama 4. The name of its projector is also its text model's."""

from __future__ import annotations

import re
from typing import Final

from moeserve.models.sources.gguf.metadata import MetadataValue

from .family import Config, TowerFamily
from .gemma4 import text_width

PROJECTOR: Final = "llama4"


def _derived(config: Config, vision: Config) -> dict[str, MetadataValue]:
    values, ratio = text_width(config, vision), vision.get("pixel_shuffle_ratio")
    if isinstance(ratio, float) and 0.1 < ratio <= 1.0:
        values["clip.vision.projector.scale_factor"] = round(1.0 / ratio)
    return values


FAMILY: Final = TowerFamily(
    name="Llama 4",
    model_types=("llama4_vision",),
    projector=PROJECTOR,
    keys={
        "block_count": ("num_hidden_layers",),
        "embedding_length": ("hidden_size",),
        "feed_forward_length": ("intermediate_size",),
        "attention.head_count": ("num_attention_heads",),
        "attention.layer_norm_epsilon": ("norm_eps",),
        "image_size": ("image_size",),
        "patch_size": ("patch_size",),
    },
    fixed={"num_channels": 3, "hidden_act": "gelu", "vision_feature_select_strategy": "default"},
    prefixes=(
        "vision_model.",
        "model.vision_model.",
        "multi_modal_projector.",
        "model.multi_modal_projector.",
    ),
    names={
        "patch_embedding": "v.patch_embd",
        "class_embedding": "v.class_embd",
        "positional_embedding_vlm": "v.position_embd.weight",
        "layernorm_pre": "v.pre_ln",
        "layernorm_post": "v.post_ln",
        "vision_adapter.mlp.fc1": "mm.model.mlp.1",
        "vision_adapter.mlp.fc2": "mm.model.mlp.2",
        "linear_1": "mm.model.fc",
    },
    layer=re.compile(r"model\.layers\.(\d{1,3})\.(.*)"),
    layer_names={
        "input_layernorm": "ln1",
        "post_attention_layernorm": "ln2",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_out",
        "mlp.fc1": "ffn_up",
        "mlp.fc2": "ffn_down",
    },
    pixels=((0.5,) * 3, (0.5,) * 3),
    derived=_derived,
)
