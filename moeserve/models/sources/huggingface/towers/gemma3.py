"""Gemma 3."""

from __future__ import annotations

import re
from math import isqrt
from typing import Final

from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.made_tensor import floats_made
from moeserve.models.sources.huggingface.safetensors_file import StoredTensor

from .family import Config, Made, TowerFamily
from .gemma4 import text_width

_TOKENS: Final = 256  # of a picture: transformers' default
_EPS: Final = 1e-6  # SigLIP's, which published files leave out


def _derived(config: Config, vision: Config) -> dict[str, MetadataValue]:
    values = text_width(config, vision)
    sizes = vision.get("image_size"), vision.get("patch_size"), config.get("mm_tokens_per_image", _TOKENS)
    side, patch, tokens = (each if isinstance(each, int) and each > 0 else 1 for each in sizes)
    values["clip.vision.projector.scale_factor"] = side // patch // isqrt(tokens)
    if "layer_norm_eps" not in vision:
        values["clip.vision.attention.layer_norm_epsilon"] = _EPS
    return values


def _made(name: str, tensor: StoredTensor, vision: Config) -> Made:
    if name == "mm_soft_emb_norm.weight":
        yield "mm.soft_emb_norm.weight", floats_made(tensor, tensor.shape, lambda v: v + 1)


FAMILY: Final = TowerFamily(
    name="Gemma 3",
    model_types=("siglip_vision_model",),
    projector="gemma3",
    keys={
        "block_count": ("num_hidden_layers",),
        "embedding_length": ("hidden_size",),
        "feed_forward_length": ("intermediate_size",),
        "attention.head_count": ("num_attention_heads",),
        "attention.layer_norm_epsilon": ("layer_norm_eps",),
        "image_size": ("image_size",),
        "patch_size": ("patch_size",),
    },
    fixed={"hidden_act": "gelu_pytorch_tanh", "num_channels": 3},
    prefixes=(
        "vision_tower.vision_model.",
        "model.vision_tower.vision_model.",
        "vision_tower.",
        "model.vision_tower.",
        "multi_modal_projector.",
        "model.multi_modal_projector.",
    ),
    names={
        "embeddings.patch_embedding": "v.patch_embd",
        "embeddings.position_embedding": "v.position_embd",
        "post_layernorm": "v.post_ln",
        "mm_input_projection_weight": "mm.input_projection.weight",
    },
    layer=re.compile(r"encoder\.layers\.(\d{1,3})\.(.*)"),
    layer_names={
        "layer_norm1": "ln1",
        "layer_norm2": "ln2",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.out_proj": "attn_out",
        "mlp.fc1": "ffn_up",
        "mlp.fc2": "ffn_down",
    },
    pixels=((0.5,) * 3, (0.5,) * 3),
    made=_made,
    derived=_derived,
)
