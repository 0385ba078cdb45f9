"""Falcon-H1 (https://arxiv.org/abs/2507.22448): in each layer attention and Mamba-2 read the same input, and both
outputs are added.

In GGUF files the model's multipliers are part of the weights; hugging_face.py multiplies a folder's weights in the same
way.
"""

from __future__ import annotations

from dataclasses import replace

from moeserve.models.attention import AttentionShape
from moeserve.models.errors import ModelError
from moeserve.models.falconh1.hugging_face import MAPPING, NORMALIZED
from moeserve.models.feed_forward import DenseFfnShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.recurrent_heads import mamba2_shape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported setting.
    Mamba-2's output is normalised if the file has the norm."""
    reader = ShapeReader(source)
    has_norm = any(name.endswith(f".{n.of_part(n.SSM_NORM)}") for name in source.tensors)
    if reader.flag(NORMALIZED, default=has_norm) != has_norm:
        norms = "norms" if has_norm else "no norms"
        raise ModelError(
            source.path,
            f"'mamba_rms_norm' is {not has_norm}, and Mamba-2 has {norms} in the files; download it again",
        )
    layer = LayerShape(
        AttentionShape(*reader.heads()),
        DenseFfnShape(reader.dense_width()),
        beside=replace(mamba2_shape(reader, source), has_norm=has_norm),
    )
    return reader.model(
        (layer,) * reader.num_layers,
        embedding_scale=reader.number("embedding_scale", 1e-6, 1e6, default=1.0),
        logit_scale=reader.number("logit_scale", 1e-6, 1e6, default=1.0),
    )


FAMILY = ModelFamily("falcon-h1", read_shape, MAPPING)
