"""Kimi-K3 (https://arxiv.org/abs/2607.24653): Kimi-Linear's layers with experts between two matrices.

Blocks read attention residuals, and every feed-forward has an activation of two hyperbolic tangents. Each number of
latent attention's output has a gate; Kimi Delta Attention has low-rank decays and output gates of full rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moeserve.models.feed_forward import DenseFfnShape, MoeShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.kimilinear.family import check_up_projections, recurrent_layers
from moeserve.models.kimilinear.k3_folders import MAPPING
from moeserve.models.latent_heads import latent_attention
from moeserve.models.recurrence import GatedDeltaNetShape
from moeserve.models.recurrent_heads import kimi_delta_heads
from moeserve.models.residual import AttentionResiduals
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource

RESIDUALS = "attn_res.block_size"
MOST_STREAMS = 64  # of the residual, which the CPU's kernel attends to


def read_shape(source: ModelSource) -> ModelShape:
    """Reads the shape from the metadata. Raises ModelError, also for a file whose up-projections are one matrix. Layers
    without KV heads are recurrent; a RoPE base is not needed."""
    reader = ShapeReader(source)
    recurrent = recurrent_layers(reader)
    check_up_projections(source, recurrent.index(False))
    num_heads = reader.integer("attention.head_count", 1, 1024)
    heads = kimi_delta_heads(reader, num_heads)
    delta_net = GatedDeltaNetShape(heads, merged_gates=False, gate_rank=heads.key_dim, has_full_gate=True)
    attention = replace(latent_attention(reader, num_heads), has_positions=False, gate="element")
    layers = (
        LayerShape(delta_net if is_recurrent else attention, ffn)
        for is_recurrent, ffn in zip(recurrent, _feed_forwards(reader, source), strict=True)
    )
    return replace(reader.model(tuple(layers), rope_theta=10000.0), streams=_residuals(reader))


def _feed_forwards(reader: ShapeReader, source: ModelSource) -> list[MoeShape | DenseFfnShape]:
    activation: dict[str, Any] = {
        "activation": "situ",
        "alpha": reader.number("activation.situ_beta", 1e-3, 1e6),
        "limit": reader.number("activation.situ_linear_beta", 0.0, 1e6, default=0.0) or None,
    }
    latent = reader.integer("expert_latent_length", 0, 1 << 16, default=0)
    of_experts: dict[str, Any] = {
        "latent": latent,
        "latent_parts": n.ROUTED_PARTS,
        "latent_norm": n.FFN_ROUTED_NORM if latent and _has_latent_norm(reader, source) else "",
    }
    return [
        replace(ffn, **activation)
        if isinstance(ffn, DenseFfnShape)
        else replace(
            ffn,
            **activation,
            **of_experts,
            shared=None if ffn.shared is None else replace(ffn.shared, **activation),
        )
        for ffn in reader.sigmoid_mixtures()
    ]


def _has_latent_norm(reader: ShapeReader, source: ModelSource) -> bool:
    """Returns whether the sum of experts between two matrices is normalised, which the tensors show. Raises ModelError
    if the setting, where there is one, says otherwise."""
    names = (n.of_layer(layer, n.FFN_ROUTED_NORM) for layer in range(reader.num_layers))
    found = next((name for name in names if name in source.tensors), None)
    if reader.flag(n.LATENT_NORMED, default=found is not None) == (found is not None):
        return found is not None
    raise reader.error(
        n.LATENT_NORMED,
        f"is true, but there is no tensor {n.FFN_ROUTED_NORM!r}; download the whole repository"
        if found is None
        else f"is false, but there is a tensor {found!r}; download the whole repository",
    )


def _residuals(reader: ShapeReader) -> AttentionResiduals | None:
    block = reader.integer(RESIDUALS, 0, 1024)
    if not block:
        return None
    residuals = AttentionResiduals(reader.num_layers, block)
    if residuals.count > MOST_STREAMS:
        raise reader.error(
            RESIDUALS, f"makes {residuals.count} residuals; at most {MOST_STREAMS} are supported"
        )
    return residuals


FAMILY = ModelFamily(architecture="kimi-k3", read_shape=read_shape, hugging_face=MAPPING)
