"""A tiny Kimi-K2.5 with random weights: a folder under the publisher's names, its mmproj file as llama.cpp's converter
writes it, and transformers' model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch

from tests.support.models.hugging_face_model import save_random
from tests.support.models.hugging_face_settings import LATENT, ROPE, SETTINGS
from tests.support.pictures.tower_writer import Tensors, add_to_folder, randomize, write_mmproj

HIDDEN, HEADS, LAYERS, FFN, PATCH, MERGE, SIDE = 32, 2, 2, 48, 4, 2, 8
IMAGE = 1  # token
_LAYER: Final = {
    "norm1": ("norm0", "ln1"),
    "norm2": ("norm1", "ln2"),
    "attn.proj": ("wo", "attn_out"),
    "mlp.fc1": ("mlp.fc0", "ffn_up"),
    "mlp.fc2": ("mlp.fc1", "ffn_down"),
}
_OUTSIDE: Final = {
    "vision_tower.patch_embed.proj": ("vision_tower.patch_embed.proj", "v.patch_embd"),
    "vision_tower.final_layernorm": ("vision_tower.encoder.final_layernorm", "v.post_ln"),
    "mm_projector.pre_norm": ("mm_projector.pre_norm", "mm.input_norm"),
    "mm_projector.in_proj": ("mm_projector.proj.0", "mm.1"),
    "mm_projector.out_proj": ("mm_projector.proj.2", "mm.2"),
}
_TABLE: Final = "vision_tower.patch_embed.pos_emb.position_embeddings"


def write_model(folder: Path) -> Any:
    """Writes the folder and `mmproj.gguf` beside it. Returns transformers' model, float32."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Kimi_K25Config
    from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25ForConditionalGeneration

    torch.manual_seed(7)
    text = {key: value for key, value in SETTINGS.items() if key != "num_experts"} | LATENT
    text |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
    text |= {"rope_parameters": ROPE}
    reader = DeepseekV3ForCausalLM(DeepseekV3Config(**text))
    save_random(reader, folder, torch.float32)
    vision = {
        "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "intermediate_size": FFN,
        "patch_size": PATCH, "pos_emb_height": SIDE, "pos_emb_width": SIDE, "merge_kernel_size": [MERGE, MERGE],
    }  # fmt: skip
    config = Kimi_K25Config(
        text_config=text, vision_config=vision, projection_hidden_size=HIDDEN, image_token_id=IMAGE,
        tie_word_embeddings=False,
    )  # fmt: skip
    model: Any = Kimi_K25ForConditionalGeneration(config)
    model.eval()
    randomize(model, 3)
    model.model.language_model.load_state_dict(reader.model.state_dict())
    model.lm_head.load_state_dict(reader.lm_head.state_dict())
    _wrap(folder, model)
    write_mmproj(folder.with_name("mmproj.gguf"), _settings(), _mmproj(model))
    return model


def _wrap(folder: Path, model: Any) -> None:
    """Makes the text model's folder one of a Kimi-K2.5."""
    from safetensors.torch import load_file

    stored: Tensors = {}
    for file in folder.glob("*.safetensors"):
        stored |= {f"language_model.{name}": values for name, values in load_file(file).items()}
        file.unlink()
    text = json.loads((folder / "config.json").read_text())
    vision = {
        "init_pos_emb_height": SIDE, "init_pos_emb_time": 4, "init_pos_emb_width": SIDE,
        "merge_kernel_size": [MERGE, MERGE], "merge_type": "sd2_tpool", "mm_hidden_size": HIDDEN,
        "mm_projector_type": "patchmerger", "model_type": "", "patch_size": PATCH, "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5, "text_hidden_size": SETTINGS["hidden_size"],
        "video_attn_type": "spatial_temporal", "vt_hidden_size": HIDDEN, "vt_intermediate_size": FFN,
        "vt_num_attention_heads": HEADS, "vt_num_hidden_layers": LAYERS,
    }  # fmt: skip
    (folder / "config.json").write_text("{}")
    whole = {"model_type": "kimi_k25", "text_config": text, "vision_config": vision}
    add_to_folder(folder, stored | _published(model), **whole)
    proc = {
        "in_patch_limit": 16384,
        "patch_size": 14,
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.6, 0.7],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": proc}))


def _published(model: Any) -> Tensors:
    """Neighbours rotate: the column's pair of a frequency, then the row's."""
    weights, made = model.model.state_dict(), {}
    made["vision_tower.patch_embed.pos_emb.weight"] = weights[_TABLE]
    made["vision_tower.patch_embed.pos_emb.time_weight"] = torch.zeros(4, 1, HIDDEN)
    for theirs, (published, _) in _OUTSIDE.items():
        made |= {f"{published}.{part}": weights[f"{theirs}.{part}"] for part in ("weight", "bias")}
    for layer in range(LAYERS):
        theirs, ours = f"vision_tower.layers.{layer}.", f"vision_tower.encoder.blocks.{layer}."
        for name, (published, _) in _LAYER.items():
            made |= {
                f"{ours}{published}.{part}": weights[f"{theirs}{name}.{part}"] for part in ("weight", "bias")
            }
        for part in ("weight", "bias"):
            made[f"{ours}wqkv.{part}"] = torch.cat(
                [_neighbours(weights[f"{theirs}attn.{each}_proj.{part}"], each) for each in "qkv"]
            )
    return made


def _neighbours(values: torch.Tensor, each: str) -> torch.Tensor:
    """From split halves, as transformers has q and k."""
    if each == "v":
        return values
    return values.view(HEADS, 2, -1, *values.shape[1:]).transpose(1, 2).reshape(values.shape)


def _mmproj(model: Any) -> Tensors:
    """In an mmproj file the column's half of a head comes before the row's."""
    weights, made = _published(model), {}
    made["v.position_embd.weight"] = weights["vision_tower.patch_embed.pos_emb.weight"]
    for published, ours in _OUTSIDE.values():
        made |= {f"{ours}.{part}": weights[f"{published}.{part}"] for part in ("weight", "bias")}
    for layer in range(LAYERS):
        theirs, ours = f"vision_tower.encoder.blocks.{layer}.", f"v.blk.{layer}."
        for published, name in _LAYER.values():
            made |= {
                f"{ours}{name}.{part}": weights[f"{theirs}{published}.{part}"] for part in ("weight", "bias")
            }
        for part in ("weight", "bias"):
            q, k, v = weights[f"{theirs}wqkv.{part}"].chunk(3)
            split = [
                each.view(HEADS, -1, 2, 2, *each.shape[1:]).transpose(1, 2).reshape(each.shape)
                for each in (q, k)
            ]
            made[f"{ours}attn_qkv.{part}"] = torch.cat([*split, v])
    return made


def _settings() -> dict[str, Any]:
    return {
        "clip.has_vision_encoder": True, "clip.projector_type": "kimik25", "clip.use_gelu": True,
        "vision.pos_emb_height": SIDE, "vision.pos_emb_width": SIDE, "vision.pos_emb_time": 4,
        "clip.vision.image_size": SIDE * PATCH, "clip.vision.patch_size": PATCH,
        "clip.vision.embedding_length": HIDDEN, "clip.vision.feed_forward_length": FFN,
        "clip.vision.projection_dim": SETTINGS["hidden_size"], "clip.vision.block_count": LAYERS,
        "clip.vision.attention.head_count": HEADS, "clip.vision.attention.layer_norm_epsilon": 1e-5,
        "clip.vision.projector.scale_factor": MERGE, "clip.vision.image_min_pixels": 8 * PATCH**2,
        "clip.vision.image_max_pixels": 16384 * PATCH**2, "clip.vision.image_mean": [0.5, 0.4, 0.3],
        "clip.vision.image_std": [0.5, 0.6, 0.7],
    }  # fmt: skip
