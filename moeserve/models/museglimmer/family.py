"""Muse Glimmer (https://huggingface.co/meta-models/Muse-Glimmer-30B), its text: no experts; embeddings are normalised;
norms before and behind each block; q and k are normalised by head, and q is scaled; a gate of attention's output. Three
of four layers have a window, the others no positions. Logits are scaled and capped.

The norms behind blocks have an epsilon of their own. In GGUF files q's scale is the weight of its norm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from moeserve.models.attention import AttentionShape
from moeserve.models.feed_forward import DenseFfnShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.museglimmer.hugging_face import BEHIND_EPS, MAPPING
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource

PERIOD: Final = 4  # layers, of which the last has no window, in files without a key


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported
    setting."""
    reader = ShapeReader(source)
    in_pairs = not reader.flag(n.ROPE_HALVES, default=False)
    attention = AttentionShape(*reader.heads(), qk_norm="head", gate="element", in_pairs=in_pairs)
    seen = reader.windowed(attention, PERIOD)
    dense = DenseFfnShape(reader.dense_width())
    layers = (
        LayerShape(each if each.window else replace(each, has_positions=False), dense, is_sandwiched=True)
        for each in seen
    )
    shape = reader.model(
        tuple(layers),
        logit_scale=reader.number("logit_scale", 1e-6, 1e6),
        logit_softcap=reader.number("final_logit_softcapping", 0.0, 1e6, default=0.0),
    )
    return replace(shape, norms_embeddings=True, post_norm_eps=BEHIND_EPS)


FAMILY = ModelFamily("muse-glimmer", read_shape, MAPPING)
