"""A tiny tower of Gemma 4 with random weights: transformers' model, and the mmproj file of it, as llama.cpp's converter
writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from gguf import GGUFWriter

HIDDEN, HEADS, LAYERS, FFN, PATCH, POOLED, POSITIONS, OUTPUT = 32, 2, 2, 48, 4, 3, 40, 64
_LAYER: Final = {
    "input_layernorm": "ln1",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
_PRODUCTS: Final = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class TruthTower:
    """transformers' tower with its projection, float32."""

    def __init__(self, *, standardized: bool = False, clamped: bool = False) -> None:
        from transformers import Gemma4TextConfig, Gemma4VisionConfig
        from transformers.models.gemma4.modeling_gemma4 import Gemma4MultimodalEmbedder, Gemma4VisionModel

        generator = torch.Generator().manual_seed(3)
        config = Gemma4VisionConfig(
            hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=HIDDEN // HEADS,
            num_hidden_layers=LAYERS, intermediate_size=FFN, patch_size=PATCH, pooling_kernel_size=POOLED,
            position_embedding_size=POSITIONS, standardize=standardized, use_clipped_linears=clamped,
        )  # fmt: skip
        self.tower = Gemma4VisionModel(config)
        self.embedder = Gemma4MultimodalEmbedder(config, Gemma4TextConfig(hidden_size=OUTPUT))
        with torch.no_grad():
            for module in (self.tower, self.embedder):
                for name, values in [*module.named_parameters(), *module.named_buffers()]:
                    self._fill(name, values, generator)

    @staticmethod
    def _fill(name: str, values: torch.Tensor, generator: torch.Generator) -> None:
        noise = torch.randn(values.shape, generator=generator)
        if "inv_freq" in name:
            return
        if name.endswith(("_min", "_max")):  # so tight that most rows meet them
            values.fill_((1.0 + 0.3 * noise.item()) * (0.8 if name.endswith("_max") else -0.8))
        elif "norm" in name or name == "std_scale":
            values.copy_(1.0 + 0.2 * noise)
        else:
            values.copy_(noise / values.shape[-1] ** 0.5)

    @torch.no_grad()
    def encode(self, pixels: np.ndarray) -> np.ndarray:
        """As transformers' processor and model have it, with padding. pixels: uint8 [height, width, 3]."""
        from transformers.models.gemma4.image_processing_pil_gemma4 import (
            convert_image_to_patches,
            pad_along_first_dim,
        )

        rows, columns = pixels.shape[0] // PATCH, pixels.shape[1] // PATCH
        scaled = (pixels.transpose(2, 0, 1) * (1 / 255)).astype(np.float32)
        places = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), axis=-1).reshape(-1, 2)
        padded = rows * columns + 2 * POOLED**2
        patches, places = pad_along_first_dim(convert_image_to_patches(scaled, PATCH), places, padded)
        found = self.tower(torch.from_numpy(patches)[None], torch.from_numpy(places)[None])
        return np.asarray(self.embedder(found.last_hidden_state).numpy())

    def write(self, path: Path) -> Path:
        writer, weights = GGUFWriter(path, "clip"), self.tower.state_dict()
        self._write_settings(writer)
        patch = weights["patch_embedder.input_proj.weight"].view(HIDDEN, PATCH, PATCH, 3)
        _add(writer, "v.patch_embd.weight", patch.permute(0, 3, 1, 2))
        _add(writer, "v.position_embd.weight", weights["patch_embedder.position_embedding_table"])
        _add(writer, "mm.input_projection.weight", self.embedder.embedding_projection.weight)
        for name in ("std_bias", "std_scale"):
            if name in weights:
                _add(writer, f"v.{name}", weights[name])
        for layer in range(LAYERS):
            theirs, ours = f"encoder.layers.{layer}.", f"v.blk.{layer}."
            for norm, name in _LAYER.items():
                _add(writer, f"{ours}{name}.weight", weights[f"{theirs}{norm}.weight"])
            for product, name in _PRODUCTS.items():
                _add(writer, f"{ours}{name}.weight", weights[f"{theirs}{product}.linear.weight"])
                for bound in ("input_min", "input_max", "output_min", "output_max"):
                    if f"{theirs}{product}.{bound}" in weights:
                        _add(writer, f"{ours}{name}.{bound}", weights[f"{theirs}{product}.{bound}"].view(1))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    @staticmethod
    def _write_settings(writer: GGUFWriter) -> None:
        writer.add_bool("clip.has_vision_encoder", True)
        writer.add_string("clip.vision.projector_type", "gemma4v")
        numbers = {
            "projection_dim": OUTPUT, "patch_size": PATCH, "embedding_length": HIDDEN, "block_count": LAYERS,
            "feed_forward_length": FFN, "attention.head_count": HEADS,
        }  # fmt: skip
        for key, number in numbers.items():
            writer.add_uint32(f"clip.vision.{key}", number)
        writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
        writer.add_array("clip.vision.image_mean", [0.0] * 3)
        writer.add_array("clip.vision.image_std", [1.0] * 3)


def _add(writer: GGUFWriter, name: str, values: Any) -> None:
    writer.add_tensor(name, values.detach().float().contiguous().numpy())
