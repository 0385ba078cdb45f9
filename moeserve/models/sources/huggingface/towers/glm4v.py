"""GLM-4.1V, GLM-4.5V and GLM-4.6V."""

from __future__ import annotations

import re
from typing import Final

from moeserve.models.sources.gguf.metadata import MetadataValue

from .family import Config, TowerFamily
from .gemma4 import text_width
from .qwen3vl import patches_made

CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
CLIP_DEVIATION: Final = (0.26862954, 0.26130258, 0.27577711)


def _derived(config: Config, vision: Config) -> dict[str, MetadataValue]:
    """Returns the settings that follow from others: the width of the tower's output, which an mmproj file states, is
    the text model's unless config.json has another."""
    values = text_width(config, vision)
    output = vision.get("out_hidden_size")
    return values | ({"clip.vision.projection_dim": output} if isinstance(output, int) else {})


FAMILY: Final = TowerFamily(
    name="GLM-4.1V, GLM-4.5V, GLM-4.6V",
    model_types=("glm4v_moe", "glm4v"),
    projector="glm4v",
    keys={
        "block_count": ("depth",),
        "embedding_length": ("hidden_size",),
        "feed_forward_length": ("intermediate_size",),
        "attention.head_count": ("num_heads",),
        "attention.layer_norm_epsilon": ("rms_norm_eps",),
        "patch_size": ("patch_size",),
        "spatial_merge_size": ("spatial_merge_size",),
    },
    fixed={"temporal_patch_size": 2, "in_channels": 3, "hidden_act": "silu", "attention_bias": False},
    prefixes=("model.visual.", "visual."),
    names={
        "patch_embed.proj.bias": "v.patch_embd.bias",
        "post_conv_layernorm": "v.norm_embd",
        "embeddings.position_embedding": "v.position_embd",
        "post_layernorm": "v.post_ln",
        "downsample": "mm.patch_merger",
        "merger.proj": "mm.model.fc",
        "merger.post_projection_norm": "mm.post_norm",
        "merger.gate_proj": "mm.gate",
        "merger.up_proj": "mm.up",
        "merger.down_proj": "mm.down",
    },
    layer=re.compile(r"blocks\.(\d{1,3})\.(.*)"),
    layer_names={
        "norm1": "ln1",
        "norm2": "ln2",
        "attn.qkv": "attn_qkv",
        "attn.proj": "attn_out",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    },
    pixels=(CLIP_MEAN, CLIP_DEVIATION),
    made=patches_made,
    derived=_derived,
)
