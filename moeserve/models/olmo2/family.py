"""OLMo 2 (https://arxiv.org/abs/2501.00656) and OLMo 3 (https://arxiv.org/abs/2512.13961): blocks read the residual
itself, and norms come behind them; q and k are normalised over all heads at once. In OLMo 3 three of four layers have a
window, and their angles are not stretched."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from moeserve.models.attention import AttentionShape
from moeserve.models.feed_forward import DenseFfnShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.olmo2.hugging_face import MAPPING, PERIOD, THETA
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource

_WINDOW_THETA: Final = "rope.freq_base_swa"


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported setting.
    A window of 0 means that no layer has one."""
    reader = ShapeReader(source)
    attention = AttentionShape(*reader.heads(), qk_norm="full")
    mixers = [attention] * reader.num_layers
    if reader.integer(n.SLIDING_WINDOW, 0, 1 << 24, default=0):
        mixers = reader.windowed(attention, PERIOD)
    theta = reader.number(_WINDOW_THETA, 2.0, 1e12) if reader.has(_WINDOW_THETA) else None
    dense = DenseFfnShape(reader.dense_width())
    layers = (
        LayerShape(_unstretched(each, theta), dense, is_sandwiched=True, has_input_norms=False)
        for each in mixers
    )
    return reader.model(tuple(layers), rope_theta=THETA)


def _unstretched(attention: AttentionShape, theta: float | None) -> AttentionShape:
    return replace(attention, rope_theta=theta, rope_scaled=False) if attention.window else attention


FAMILY = ModelFamily("olmo2", read_shape, MAPPING)
