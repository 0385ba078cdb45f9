"""North Mini Code and other models of Cohere's Command line with experts
(https://huggingface.co/CohereLabs/North-Mini-Code-1.0).

Attention and feed-forward of a layer read the same norm of its input, and both outputs are added to that input.
RoPE is in layers with a window and in the first layers, which have no experts; the other layers have no positions.
The router scores by sigmoid. Norms are RMSNorm or LayerNorm without a bias. Some files have an MTP layer, which
predicts the token after the next.
"""

from __future__ import annotations

from dataclasses import replace

from moeserve.models.attention import AttentionShape
from moeserve.models.cohere2moe.hugging_face import MAPPING
from moeserve.models.feed_forward import DenseFfnShape, MoeShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource

PERIOD = 4  # layers; if no key says otherwise, the last of them has no window


def read_shape(source: ModelSource) -> ModelShape:
    """Reads the shape from the metadata. Raises ModelError, also for shared experts, whose output the published model
    does not have: llama.cpp averages it with the routed experts'."""
    reader = ShapeReader(source)
    reader.only("expert_shared_count", 0)
    reader.only("expert_shared_feed_forward_length", 0)
    attention = AttentionShape(*reader.heads(), in_pairs=True)
    seen = reader.windowed(attention, PERIOD)
    mixtures = reader.sigmoid_mixtures()
    unrotated = reader.optional_flags(n.UNROTATED_LAYERS) or [
        not each.window and isinstance(ffn, MoeShape) for each, ffn in zip(seen, mixtures, strict=True)
    ]
    layers = [
        _layer(each, ffn, has_positions=not without)
        for each, ffn, without in zip(seen, mixtures, unrotated, strict=True)
    ]
    centers = not reader.has(n.RMS_EPS)
    shape = reader.model(
        tuple(layers),
        rms_eps=reader.number(n.LAYER_NORM_EPS, 1e-12, 1e-2) if centers else None,
        logit_scale=reader.number("logit_scale", 0.0, 1e6, default=1.0) or 1.0,
    )
    return replace(shape, centers_norms=centers)


def _layer(attention: AttentionShape, ffn: MoeShape | DenseFfnShape, *, has_positions: bool) -> LayerShape:
    return LayerShape(replace(attention, has_positions=has_positions), ffn, is_parallel=True)


def next_token_layer(_source: ModelSource, layer: LayerShape) -> LayerShape:
    """Returns the layer of the next-token block: like the last one, but it has positions and no window."""
    assert isinstance(layer.mixer, AttentionShape)
    return replace(layer, mixer=replace(layer.mixer, window=0, has_positions=True))


FAMILY = ModelFamily(
    "cohere2moe", read_shape, MAPPING, has_next_token_block=True, next_token_layer=next_token_layer
)
