"""Ling 3 and Ring 3 (https://huggingface.co/inclusionAI/Ling-3.0-flash), which llama.cpp calls bailingmoe3.

Most layers are Kimi Delta Attention, whose decays have a lower bound and come, like its output gates, from one matrix
each. Every few layers one has DeepSeek's latent attention, whose heads have gates. The first layers have no experts;
the others have DeepSeek-V3's router with groups, and an ungated shared expert. The last layer in the file predicts a
further token (MTP).
"""

from __future__ import annotations

from dataclasses import replace

from moeserve.models.bailingmoe3.hugging_face import MAPPING
from moeserve.models.clamped_ffns import clamped, clamped_next_token
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.latent_heads import latent_attention
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
    delta_net = _delta_net(reader, num_heads)
    attention = replace(latent_attention(reader, num_heads), gate="head")
    layers = (
        LayerShape(delta_net if is_recurrent else attention, ffn)
        for is_recurrent, ffn in zip(recurrent, clamped(reader, reader.sigmoid_mixtures()), strict=True)
    )
    return replace(reader.model(tuple(layers)), next_token_norm=n.LAYER_OUTPUT_NORM)


def _delta_net(reader: ShapeReader, num_heads: int) -> GatedDeltaNetShape:
    if not reader.flag("kda.safe_gate", default=True):
        raise reader.error("kda.safe_gate", "is false; only decays with a lower bound are supported")
    bound = reader.number("kda.gate_lower_bound", -1e3, -1e-3)
    heads = replace(kimi_delta_heads(reader, num_heads), decay_bound=bound)
    return GatedDeltaNetShape(heads, merged_gates=False, has_positive_rate=True)


def next_token_layer(source: ModelSource, layer: LayerShape) -> LayerShape:
    """Returns the layer `layer` with the activation limits of the next-token block's feed-forward. Raises ModelError
    for a limit that is no number or out of range."""
    return clamped_next_token(ShapeReader(source), layer)


FAMILY = ModelFamily(
    "bailingmoe3", read_shape, MAPPING, has_next_token_block=True, next_token_layer=next_token_layer
)
