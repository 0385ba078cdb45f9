"""Laguna (https://huggingface.co/poolside/Laguna-XS.2).

One of four layers has full attention, with fewer heads and scaled RoPE on half of each head; the others have a sliding
window. Each head's output is multiplied by the softplus of a gate. The router is DeepSeek-V3's, beside a shared expert.
"""

from __future__ import annotations

from moeserve.models.attention import AttentionShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.laguna.hugging_face import MAPPING
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource

PERIOD = 4  # the first of every group of this many layers has full attention; no key says so


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported setting.
    Without a window's size no layer has a window."""
    reader = ShapeReader(source)
    head_dim = reader.integer("attention.key_length", 2, 1024)
    reader.only("attention.value_length", head_dim)
    heads = reader.layer_heads()
    window = reader.integer(n.SLIDING_WINDOW, 0, 1 << 24, default=0)
    has_window = reader.optional_flags(n.WINDOWED_LAYERS) or [
        window > 0 and index % PERIOD > 0 for index in range(reader.num_layers)
    ]

    def attention(index: int) -> AttentionShape:
        _check_gate(reader, source, index, heads[index][0])
        if not has_window[index]:
            rotated = reader.rotated(head_dim)
            return AttentionShape(
                *heads[index], head_dim, qk_norm="head", rotated=rotated, gate="head_softplus"
            )
        return AttentionShape(
            *heads[index],
            head_dim,
            qk_norm="head",
            rotated=reader.rotated(head_dim, "rope.dimension_count_swa"),
            window=reader.integer(n.SLIDING_WINDOW, 1, 1 << 24),
            rope_theta=reader.number("rope.freq_base_swa", 2.0, 1e12),
            rope_scaled=False,
            gate="head_softplus",
        )

    mixtures = reader.sigmoid_mixtures(normalize=True)
    return reader.model(tuple(LayerShape(attention(index), ffn) for index, ffn in enumerate(mixtures)))


def _check_gate(reader: ShapeReader, source: ModelSource, index: int, heads: int) -> None:
    """Raises ModelError unless the model has one gate per head."""
    gate = source.tensors.get(n.of_layer(index, n.ATTN_GATE))
    if gate is not None and gate.shape[0] != heads:
        raise reader.error(
            "attention.head_count",
            f"has {heads} for layer {index}, whose output has {gate.shape[0]} gates; "
            "only one for each head is supported",
        )


FAMILY = ModelFamily(architecture="laguna", read_shape=read_shape, hugging_face=MAPPING)
