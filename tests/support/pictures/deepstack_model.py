"""A tiny Qwen3-VL, with experts or without, of random weights: a folder of transformers' model, and the mmproj file of
its tower, as llama.cpp's converter writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from gguf import GGUFWriter

from tests.support.models.hugging_face_model import write_wrapped
from tests.support.models.hugging_face_settings import SETTINGS

HIDDEN, HEADS, LAYERS, FFN, PATCH, MERGE, DEEP = 32, 2, 4, 48, 4, 2, [0, 2]
IMAGE, VIDEO, START, END = 1, 2, 3, 4  # tokens
_NAMES: Final = {
    "patch_embed.proj.bias": "v.patch_embd.bias",
    "pos_embed.weight": "v.position_embd.weight",
    "merger.norm": "v.post_ln",
    "merger.linear_fc1": "mm.0",
    "merger.linear_fc2": "mm.2",
}
_LAYER: Final = {
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
}


def write_model(folder: Path, *, has_experts: bool) -> Any:
    """Returns transformers' model, float32."""
    import transformers

    torch.manual_seed(7)
    name = "Qwen3VLMoe" if has_experts else "Qwen3VL"
    vision = {
        "depth": LAYERS, "hidden_size": HIDDEN, "intermediate_size": FFN, "num_heads": HEADS, "patch_size": PATCH,
        "spatial_merge_size": MERGE, "out_hidden_size": SETTINGS["hidden_size"], "num_position_embeddings": 36,
        "deepstack_visual_indexes": DEEP, "initializer_range": 0.15,
    }  # fmt: skip
    rope = {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True,
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(
        text_config=SETTINGS | {"rope_parameters": rope, "head_dim": 32, "intermediate_size": 192},
        vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START,
        vision_end_token_id=END,
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    write_wrapped(model, folder)
    return model


def write_tower(model: Any, path: Path) -> Path:
    weights = model.model.visual.state_dict()
    writer = GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "qwen3vl_merger")
    numbers = {
        "projection_dim": SETTINGS["hidden_size"], "patch_size": PATCH, "embedding_length": HIDDEN,
        "block_count": LAYERS, "feed_forward_length": FFN, "attention.head_count": HEADS,
        "spatial_merge_size": MERGE,
    }  # fmt: skip
    for key, number in numbers.items():
        writer.add_uint32(f"clip.vision.{key}", number)
    for key in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{key}", [0.5] * 3)
    writer.add_array("clip.vision.is_deepstack_layers", [layer in DEEP for layer in range(LAYERS)])
    names = _NAMES | {
        f"blocks.{layer}.{theirs}": f"v.blk.{layer}.{ours}"
        for layer in range(LAYERS)
        for theirs, ours in _LAYER.items()
    }
    for number, layer in enumerate(DEEP):
        for theirs, ours in (("norm", "norm"), ("linear_fc1", "fc1"), ("linear_fc2", "fc2")):
            names[f"deepstack_merger_list.{number}.{theirs}"] = f"v.deepstack.{layer}.{ours}"
    for theirs, ours in names.items():
        for part in ("", ".weight", ".bias"):
            if theirs + part in weights:
                _add(writer, ours + part, weights[theirs + part])
    for time, name in enumerate(("v.patch_embd.weight", "v.patch_embd.weight.1")):
        _add(writer, name, weights["patch_embed.proj.weight"][:, :, time])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, name: str, values: torch.Tensor) -> None:
    writer.add_tensor(name, np.ascontiguousarray(values.detach().float().numpy()))
