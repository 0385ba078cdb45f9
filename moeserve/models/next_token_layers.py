"""Next-token blocks whose layer is unlike the model's last attention layer: its attention is shaped like one layer's,
and its feed-forward like another's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moeserve.models.attention import AttentionShape
from moeserve.models.errors import ModelError
from moeserve.models.feed_forward import MoeShape
from moeserve.models.interface import LayerShape
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource


def layer_with_parts(source: ModelSource, layers: Sequence[LayerShape], *, has_window: bool) -> LayerShape:
    """Returns a layer with the attention of a layer with or without a window, and with experts if the block has a
    router. layers: all ordinary ones. Raises ModelError if none has such parts."""
    has_experts = n.of_layer(len(layers), n.FFN_GATE_INP) in source.tensors
    attention = next((layer for layer in layers if _has_window(layer) == has_window), None)
    ffn = next((layer.ffn for layer in layers if isinstance(layer.ffn, MoeShape) == has_experts), None)
    if attention is None or ffn is None:
        window, experts = ("with" if each else "without" for each in (has_window, has_experts))
        raise ModelError(
            source.path,
            f"its next-token block (MTP) is a layer {window} a window and {experts} experts, and the model has no "
            "other such layer, which is not supported: draft by look-up, with --speculative-config "
            '{"method": "ngram", "num_speculative_tokens": 4}',
        )
    return replace(attention, ffn=ffn)


def _has_window(layer: LayerShape) -> bool:
    return isinstance(layer.mixer, AttentionShape) and layer.mixer.window > 0
