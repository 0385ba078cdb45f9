"""MiniMax-M3. In a folder, heads have the first halves of the pairs of time, height and width, then the second halves,
then the numbers that do not rotate. An mmproj file has the pairs of each axis together."""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.made_tensor import values_made
from moeserve.models.sources.huggingface.safetensors_file import StoredTensor

from .family import Config, Made, TowerFamily
from .gemma4 import text_width
from .glm4v import CLIP_DEVIATION, CLIP_MEAN
from .qwen3vl import split_times

_PATCH: Final = "embeddings.patch_embedding.weight"
_HEADS: Final = "num_attention_heads"
_Q_AND_K: Final = re.compile(r"encoder\.layers\.(\d{1,3})\.self_attn\.([qk])_proj\.(weight|bias)")


def _made(name: str, tensor: StoredTensor, vision: Config) -> Made:
    if name == _PATCH:
        yield from split_times(tensor)
    match, heads = _Q_AND_K.fullmatch(name), vision.get(_HEADS)
    rows = tensor.shape[0] if tensor.shape else 0
    if match is None or type(heads) is not int or heads < 1 or not rows or rows % (2 * heads):
        return
    order = _axes_apart(rows, heads)
    ours = f"v.blk.{match[1]}.attn_{match[2]}.{match[3]}"
    yield ours, values_made(tensor, tensor.shape, lambda v: v[order])


def _axes_apart(width: int, heads: int) -> npt.NDArray[np.int64]:
    """Returns the stored row for each row of an mmproj file: [width]."""
    count: npt.NDArray[Any] = np.arange(width).reshape(heads, -1)
    pairs = count.shape[1] // 3 // 2  # of each axis
    rotated = count[:, : 6 * pairs].reshape(heads, 2, 3, pairs).transpose(0, 2, 1, 3).reshape(heads, -1)
    return np.concatenate([rotated, count[:, 6 * pairs :]], axis=1).reshape(-1)


def _derived(config: Config, vision: Config) -> dict[str, MetadataValue]:
    values = text_width(config, vision)
    compression = vision.get("img_token_compression_config")
    merge = compression.get("spatial_merge_size") if isinstance(compression, dict) else None
    return values | ({"clip.vision.spatial_merge_size": merge} if isinstance(merge, int) else {})


FAMILY: Final = TowerFamily(
    name="MiniMax-M3",
    model_types=("minimax_m3_vl",),
    projector="minimax_m3",
    keys={
        "block_count": ("num_hidden_layers",),
        "embedding_length": ("hidden_size",),
        "feed_forward_length": ("intermediate_size",),
        "attention.head_count": (_HEADS,),
        "attention.layer_norm_epsilon": ("layer_norm_eps",),
        "patch_size": ("patch_size",),
        "spatial_merge_size": ("spatial_merge_size",),
    },
    fixed={"num_channels": 3, "hidden_act": "gelu", "rope_mode": "3d", "rope_theta": 10000.0},
    prefixes=("vision_tower.vision_model.", "multi_modal_projector.", "patch_merge_mlp."),
    names={
        "pre_layrnorm": "v.pre_ln",
        "multi_modal_projector.linear_1": "mm.1",
        "multi_modal_projector.linear_2": "mm.2",
        "patch_merge_mlp.linear_1": "mm.merger.fc1",
        "patch_merge_mlp.linear_2": "mm.merger.fc2",
    },
    layer=re.compile(r"encoder\.layers\.(\d{1,3})\.(.*)"),
    layer_names={
        "layer_norm1": "ln1",
        "layer_norm2": "ln2",
        "self_attn.v_proj": "attn_v",
        "self_attn.out_proj": "attn_out",
        "mlp.fc1": "ffn_up",
        "mlp.fc2": "ffn_down",
    },
    pixels=(CLIP_MEAN, CLIP_DEVIATION),
    made=_made,
    derived=_derived,
    whole_names=("multi_modal_projector.", "patch_merge_mlp."),
)
