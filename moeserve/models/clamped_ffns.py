"""Reads the limits of SiLU and of up-projections that some models' feed-forwards have, by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moeserve.models.feed_forward import DenseFfnShape, MoeShape
from moeserve.models.interface import LayerShape
from moeserve.models.shape_reader import ShapeReader


def clamped(
    reader: ShapeReader, feed_forwards: Sequence[MoeShape | DenseFfnShape]
) -> list[MoeShape | DenseFfnShape]:
    """Returns the layers' feed-forwards with the activation limits that the file has, if it has any. Raises ModelError
    for a limit that is no number or out of range."""
    routed, shared = (reader.layer_limits(f"swiglu_clamp_{kind}") for kind in ("exp", "shexp"))
    return [_clamped(*each) for each in zip(feed_forwards, routed, shared, strict=True)]


def clamped_next_token(reader: ShapeReader, layer: LayerShape) -> LayerShape:
    """Returns the next-token block's layer with its own activation limits in place of those of `layer`. Raises
    ModelError for a limit that is no number or out of range."""
    if layer.ffn is None:
        return layer
    routed, shared = (reader.next_token_limit(f"swiglu_clamp_{kind}") for kind in ("exp", "shexp"))
    return replace(layer, ffn=_clamped(layer.ffn, routed, shared))


def _clamped(
    ffn: MoeShape | DenseFfnShape, routed: float | None, shared: float | None
) -> MoeShape | DenseFfnShape:
    """Returns the feed-forward with limits of its activations. routed: the limit of routed experts; shared:
    the limit of feed-forwards that all tokens pass."""
    if isinstance(ffn, DenseFfnShape):
        return replace(ffn, limit=shared)
    return replace(
        ffn, limit=routed, shared=None if ffn.shared is None else replace(ffn.shared, limit=shared)
    )
