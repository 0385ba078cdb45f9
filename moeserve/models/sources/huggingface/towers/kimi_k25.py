"""Kimi-K2.5, K2.6 and K2.7. Numbers rotate with their neighbours. In a folder, each frequency's pair for the column
precedes its pair for the row; an mmproj file has all pairs for the column first."""

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

_HEADS: Final = ("vt_num_attention_heads", "num_attention_heads")
_QKV: Final = re.compile(r"encoder\.blocks\.(\d{1,3})\.wqkv\.(weight|bias)")


def _made(name: str, tensor: StoredTensor, vision: Config) -> Made:
    match = _QKV.fullmatch(name)
    heads = next((vision[key] for key in _HEADS if key in vision), None)
    rows = tensor.shape[0] if tensor.shape else 0
    if match is None or type(heads) is not int or heads < 1 or rows % (12 * heads):
        return
    order = _in_halves(rows // 3, heads)
    yield f"v.blk.{match[1]}.attn_qkv.{match[2]}", values_made(tensor, tensor.shape, lambda v: v[order])


def _in_halves(width: int, heads: int) -> npt.NDArray[np.int64]:
    """Returns the stored row of q, k and v for each of theirs in an mmproj file: [3 * width]."""
    count: npt.NDArray[Any] = np.arange(width).reshape(
        heads, -1, 2, 2
    )  # [heads, frequency, column or row, pair]
    q = count.transpose(0, 2, 1, 3).reshape(-1)
    return np.concatenate([q, width + q, 2 * width + np.arange(width)])


def _derived(config: Config, vision: Config) -> dict[str, MetadataValue]:
    values = text_width(config, vision)
    merge = vision.get("merge_kernel_size")
    if isinstance(merge, list) and len(merge) == 2 and merge[0] == merge[1] and isinstance(merge[0], int):
        values["clip.vision.projector.scale_factor"] = merge[0]
    return values


FAMILY: Final = TowerFamily(
    name="Kimi-K2.5",
    model_types=("kimi_k25",),
    projector="kimik25",
    keys={
        "block_count": ("vt_num_hidden_layers", "num_hidden_layers"),
        "embedding_length": ("vt_hidden_size", "hidden_size"),
        "feed_forward_length": ("vt_intermediate_size", "intermediate_size"),
        "attention.head_count": _HEADS,
        "attention.layer_norm_epsilon": ("projector_ln_eps",),
        "patch_size": ("patch_size",),
    },
    fixed={
        "merge_type": "sd2_tpool",
        "mm_projector_type": "patchmerger",
        "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu",
        "hidden_act": "gelu_pytorch_tanh",
    },
    prefixes=("vision_tower.", "mm_projector."),
    names={
        "patch_embed.proj": "v.patch_embd",
        "patch_embed.pos_emb.weight": "v.position_embd.weight",
        "encoder.final_layernorm": "v.post_ln",
        "pre_norm": "mm.input_norm",
        "proj.0": "mm.1",
        "proj.2": "mm.2",
    },
    layer=re.compile(r"encoder\.blocks\.(\d{1,3})\.(.*)"),
    layer_names={
        "norm0": "ln1",
        "norm1": "ln2",
        "wo": "attn_out",
        "mlp.fc0": "ffn_up",
        "mlp.fc1": "ffn_down",
    },
    pixels=((0.5,) * 3, (0.5,) * 3),
    made=_made,
    derived=_derived,
    skipped=frozenset({"patch_embed.pos_emb.time_weight"}),  # of videos
)
