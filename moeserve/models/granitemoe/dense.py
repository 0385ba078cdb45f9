"""Granite 3 and 4 without experts (https://huggingface.co/ibm-granite/granite-3.3-8b-instruct): like the models with
experts, with one feed-forward in each layer instead."""

from __future__ import annotations

from dataclasses import replace

from moeserve.models.feed_forward import DenseFfnShape
from moeserve.models.granitemoe.family import FAMILY as GRANITE_MOE
from moeserve.models.granitemoe.family import attention, scaled_model
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.huggingface.mapping import DECODER_LAYER, DENSE_FFN
from moeserve.models.sources.source import ModelSource

_WITH_EXPERTS = GRANITE_MOE.hugging_face
assert _WITH_EXPERTS is not None
_OF_EXPERTS = ("expert_count", "expert_used_count")


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported
    setting."""
    reader = ShapeReader(source)
    layer = LayerShape(attention(reader), DenseFfnShape(reader.dense_width()))
    return scaled_model(reader, (layer,) * reader.num_layers)


MAPPING = replace(
    _WITH_EXPERTS,
    model_type="granite",
    keys={ours: theirs for ours, theirs in _WITH_EXPERTS.keys.items() if ours not in _OF_EXPERTS},
    fixed={**_WITH_EXPERTS.fixed, "mlp_bias": (False, False)},
    layer=DECODER_LAYER | DENSE_FFN,
    moe={},
    made=None,
)
FAMILY = ModelFamily(architecture="granite", read_shape=read_shape, hugging_face=MAPPING)
