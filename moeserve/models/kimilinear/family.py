"""Kimi-Linear (https://arxiv.org/abs/2510.26692).

Three of four layers are Kimi Delta Attention, a gated DeltaNet in which each key dimension has its own decay. The
fourth is DeepSeek's latent attention without positions. The first layers have no experts; the others have DeepSeek-V3's
router and an ungated shared expert.
"""

from __future__ import annotations

from dataclasses import replace

from moeserve.models.errors import ModelError
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.kimilinear.hugging_face import MAPPING
from moeserve.models.latent_heads import latent_attention
from moeserve.models.recurrence import GatedDeltaNetShape
from moeserve.models.recurrent_heads import kimi_delta_heads
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource


def read_shape(source: ModelSource) -> ModelShape:
    """Reads the shape from the metadata. Raises ModelError, also for an older file whose up-projections are one
    matrix. Layers without KV heads are recurrent. No key states that expert weights are normalised; a RoPE base is
    not needed."""
    reader = ShapeReader(source)
    recurrent = recurrent_layers(reader)
    check_up_projections(source, recurrent.index(False))
    num_heads = reader.integer("attention.head_count", 1, 1024)
    delta_net = _delta_net(reader, num_heads)
    # Keys have further dimensions next to the latent vector, as in other models, but here these are not rotated.
    attention = replace(latent_attention(reader, num_heads), has_positions=False)
    mixtures = reader.sigmoid_mixtures(normalize=True)
    layers = (
        LayerShape(delta_net if is_recurrent else attention, ffn)
        for is_recurrent, ffn in zip(recurrent, mixtures, strict=True)
    )
    return reader.model(tuple(layers), rope_theta=10000.0)


def recurrent_layers(reader: ShapeReader) -> list[bool]:
    """Reads which layers are recurrent: those without KV heads. Raises ModelError if none attends."""
    recurrent = [heads == 0 for heads in reader.layer_integers("attention.head_count_kv", 0, 1024)]
    if all(recurrent):
        raise reader.error("attention.head_count_kv", "has no attention layer, which is not supported")
    return recurrent


def check_up_projections(source: ModelSource, layer: int) -> None:
    """Raises ModelError if layer `layer`, which attends, has its up-projections as one matrix."""
    if (name := n.of_layer(layer, n.ATTN_KV_B)) in source.tensors:
        raise ModelError(
            source.path,
            f"tensor {name!r} has the up-projections of keys and values as one; they are expected as attn_k_b and "
            "attn_v_b: convert the model again",
        )


def _delta_net(reader: ShapeReader, num_heads: int) -> GatedDeltaNetShape:
    """The low-rank inputs of decays and output gates are as wide as a head."""
    heads = kimi_delta_heads(reader, num_heads)
    return GatedDeltaNetShape(heads, merged_gates=False, gate_rank=heads.key_dim)


FAMILY = ModelFamily(architecture="kimi-linear", read_shape=read_shape, hugging_face=MAPPING)
