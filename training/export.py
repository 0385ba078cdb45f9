"""Trained weights as a GGUF that the server serves.

    python -m training.export vocabulary.gguf model.pt moeserve-demo-q8_0.gguf

Matrices are Q8_0 (8 bits, a scale for each 32 values); norms and routers, which are small, stay F32.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType, LlamaFileType
from torch import Tensor

from moeserve.models.sources.gguf import GGUFFile, open_gguf
from training.model import Layer, Model
from training.shape import Shape
from training.tokenizer import add_vocabulary, read
from training.train import load

NAME: Final = "moeserve demo"
DESCRIPTION: Final = (
    "A tiny Qwen3-MoE that adds and subtracts small numbers, answers questions about a text, tells short stories and "
    "calls tools. Trained from scratch on generated text, to show and test the server moeserve."
)


def export(model: Model, vocabulary: GGUFFile, path: Path, quantise: bool = True) -> None:
    """Without `quantise` everything is F32."""
    writer = GGUFWriter(path, "qwen3moe")
    _add_metadata(writer, model.shape, quantise)
    add_vocabulary(writer, *read(vocabulary))
    for name, weight in tensors(model).items():
        _add(writer, name, weight, quantise and weight.dim() > 1 and "ffn_gate_inp" not in name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(model: Model) -> dict[str, Tensor]:
    """llama.cpp's names; matrices [out, in], experts [experts, out, in]."""
    shape, named = (
        model.shape,
        {"token_embd.weight": model.embedding.weight, "output_norm.weight": model.norm.weight},
    )
    rows = (shape.experts, shape.expert_width, shape.hidden)
    columns = (shape.hidden, shape.experts, shape.expert_width)
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        attention, experts = layer.attention, layer.experts
        of_layer = {
            "attn_norm": layer.attention_norm.weight,
            "attn_q": attention.q.weight,
            "attn_k": attention.k.weight,
            "attn_v": attention.v.weight,
            "attn_output": attention.output.weight,
            "attn_q_norm": attention.q_norm.weight,
            "attn_k_norm": attention.k_norm.weight,
            "ffn_norm": layer.experts_norm.weight,
            "ffn_gate_inp": experts.router.weight,
            "ffn_gate_exps": experts.gate.weight.view(rows),
            "ffn_up_exps": experts.up.weight.view(rows),
            "ffn_down_exps": experts.down.weight.view(columns).transpose(0, 1),
        }
        named |= {f"blk.{index}.{part}.weight": weight for part, weight in of_layer.items()}
    return {name: weight.detach().float().cpu() for name, weight in named.items()}


def _add(writer: GGUFWriter, name: str, weight: Tensor, quantise: bool) -> None:
    values: np.ndarray[Any, Any] = np.ascontiguousarray(weight.numpy())
    if quantise:
        kind = GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, values)


def _add_metadata(writer: GGUFWriter, shape: Shape, quantise: bool) -> None:
    writer.add_name(NAME)
    writer.add_description(DESCRIPTION)
    writer.add_license("apache-2.0")
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0 if quantise else LlamaFileType.ALL_F32)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.expert_width * shape.top_k)
    writer.add_expert_feed_forward_length(shape.expert_width)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.rms_eps)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.top_k)


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes trained weights as a Q8_0 GGUF.")
    parser.add_argument("vocabulary", type=Path, help="of training.tokenizer")
    parser.add_argument("weights", type=Path, help="of training.train")
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    export(load(arguments.weights), open_gguf(arguments.vocabulary), arguments.output)
    print(f"{arguments.output}: {arguments.output.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
