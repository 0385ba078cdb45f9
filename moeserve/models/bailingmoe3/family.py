"""Ling 3 and Ring 3 (https://huggingface.co/inclusionAI/Ling-3.0-flash), which llama.cpp calls bailingmoe3.

Most layers are Kimi Delta Attention, whose decays have a lower bound and come, like its output gates, from one matrix
each. Every few layers one is DeepSeek's latent attention, whose heads have gates. The first layers have no experts;
then DeepSeek-V3's router in groups with an ungated shared expert. The last layer in the file predicts a further token
(MTP).
"""

from __future__ import annotations

from dataclasses import replace

from moeserve.models.bailingmoe3.hugging_face import MAPPING
from moeserve.models.clamped_ffns import clamped
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.latent import LatentAttentionShape
from moeserve.models.recurrence import GatedDeltaNetShape
from moeserve.models.recurrent_heads import kimi_delta_heads
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource


def read_shape(source: ModelSource) -> ModelShape:
    """Reads the shape from the metadata. Raises ModelError, also for decays without a lower bound. Layers without KV
    heads are recurrent."""
    reader = ShapeReader(source)
    recurrent = [heads == 0 for heads in reader.layer_integers("attention.head_count_kv", 0, 1024)]
    if all(recurrent):
        raise reader.error("attention.head_count_kv", "has no attention layer, which is not supported")
    num_heads = reader.integer("attention.head_count", 1, 1024)
    delta_net, attention = _delta_net(reader, num_heads), _attention(reader, num_heads)
    layers = (
        LayerShape(delta_net if is_recurrent else attention, ffn)
        for is_recurrent, ffn in zip(recurrent, clamped(reader, reader.sigmoid_mixtures()), strict=True)
    )
    return replace(reader.model(tuple(layers)), next_token_norm=n.LAYER_OUTPUT_NORM)


def _delta_net(reader: ShapeReader, num_heads: int) -> GatedDeltaNetShape:
    if not reader.flag("kda.safe_gate", default=True):
        raise reader.error("kda.safe_gate", "is false; decays with a lower bound are supported")
    bound = reader.number("kda.gate_lower_bound", -1e3, -1e-3)
    heads = replace(kimi_delta_heads(reader, num_heads), decay_bound=bound)
    return GatedDeltaNetShape(heads, merged_gates=False, has_positive_rate=True)


def _attention(reader: ShapeReader, num_heads: int) -> LatentAttentionShape:
    rank = reader.integer("attention.kv_lora_rank", 1, 1024)
    rotary = reader.integer("rope.dimension_count", 2, 1024)
    if rotary % 2:
        raise reader.error("rope.dimension_count", f"is {rotary}; RoPE needs an even number")
    reader.only("attention.key_length", rank + rotary)
    key_length = reader.integer("attention.key_length_mla", rotary + 1, 2048)
    return LatentAttentionShape(
        num_heads=num_heads,
        q_rank=reader.integer("attention.q_lora_rank", 0, 1 << 16, default=0),
        rank=rank,
        nope_dim=key_length - rotary,
        rotary_dim=rotary,
        value_dim=reader.integer("attention.value_length_mla", 1, 2048),
        scale=key_length**-0.5,
        has_head_gate=True,
    )


FAMILY = ModelFamily("bailingmoe3", read_shape, MAPPING, has_next_token_block=True)
