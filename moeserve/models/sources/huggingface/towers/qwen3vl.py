"""Qwen3-VL, Qwen3.5, Qwen3.6 and Qwen3.8."""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.layer_settings import DEEP_LAYERS
from moeserve.models.sources.huggingface.made_tensor import values_made
from moeserve.models.sources.huggingface.safetensors_file import StoredTensor

from .family import Config, Made, TowerFamily

_PATCH: Final = "patch_embed.proj.weight"  # [hidden, channel, time, row, column]
_DEEP: Final = re.compile(r"deepstack_merger_list\.(\d{1,3})\.(norm|linear_fc1|linear_fc2)\.(.*)")
_DEEP_NAMES: Final = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}
_MOST_LAYERS: Final = 512


def patches_made(name: str, tensor: StoredTensor, vision: Config) -> Made:
    """Yields a patch's two matrices, one for each of two frames."""
    if name == _PATCH:
        yield from split_times(tensor)


def split_times(tensor: StoredTensor) -> Made:
    """Yields the two matrices of [hidden, channel, time, row, column]."""
    shape = tensor.shape
    if len(shape) == 5 and shape[2] == 2:
        ours = (*shape[:2], *shape[3:])
        yield "v.patch_embd.weight", values_made(tensor, ours, lambda v: v[:, :, 0])
        yield "v.patch_embd.weight.1", values_made(tensor, ours, lambda v: v[:, :, 1])


def _made(name: str, tensor: StoredTensor, vision: Config) -> Made:
    yield from patches_made(name, tensor, vision)
    deep = vision.get(DEEP_LAYERS)
    deep = deep if isinstance(deep, list) else []
    if (match := _DEEP.fullmatch(name)) and int(match[1]) < len(deep):
        ours = f"v.deepstack.{deep[int(match[1])]}.{_DEEP_NAMES[match[2]]}.{match[3]}"
        yield ours, values_made(tensor, tensor.shape, lambda v: v)


def _derived(config: Config, vision: Config) -> dict[str, MetadataValue]:
    deep, depth = vision.get(DEEP_LAYERS), vision.get("depth")
    if isinstance(deep, list) and deep and isinstance(depth, int) and 0 < depth <= _MOST_LAYERS:
        return {"clip.vision.is_deepstack_layers": np.isin(np.arange(depth), deep)}
    return {}


FAMILY: Final = TowerFamily(
    name="Qwen3-VL, Qwen3.5, Qwen3.6, Qwen3.8",
    model_types=("qwen3_vl", "qwen3_5", "qwen4_exp"),
    projector="qwen3vl_merger",
    keys={
        "block_count": ("depth",),
        "embedding_length": ("hidden_size",),
        "feed_forward_length": ("intermediate_size",),
        "attention.head_count": ("num_heads",),
        "patch_size": ("patch_size",),
        "spatial_merge_size": ("spatial_merge_size",),
        "projection_dim": ("out_hidden_size",),
    },
    fixed={"temporal_patch_size": 2, "in_channels": 3, "hidden_act": "gelu_pytorch_tanh"},
    prefixes=("model.visual.", "visual."),
    names={
        "patch_embed.proj.bias": "v.patch_embd.bias",
        "pos_embed.weight": "v.position_embd.weight",
        "merger.norm": "v.post_ln",
        "merger.linear_fc1": "mm.0",
        "merger.linear_fc2": "mm.2",
    },
    layer=re.compile(r"blocks\.(\d{1,3})\.(.*)"),
    layer_names={
        "norm1": "ln1",
        "norm2": "ln2",
        "attn.qkv": "attn_qkv",
        "attn.proj": "attn_out",
        "mlp.linear_fc1": "ffn_up",
        "mlp.linear_fc2": "ffn_down",
    },
    pixels=((0.5,) * 3, (0.5,) * 3),
    made=_made,
    derived=_derived,
)
