"""Chooses the products that compute only keys and values, for rows whose KV is stored but which do not attend."""

from __future__ import annotations

from collections.abc import Sequence

from moeserve.kernels.cpu_stream import LinearGroup, Matrix
from moeserve.models.attention import AttentionShape
from moeserve.models.interface import ModelShape
from moeserve.models.latent import LatentAttentionShape
from moeserve.models.loading.floats import read_floats
from moeserve.models.loading.head_order import in_halves
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource


def kv_products(
    source: ModelSource, shape: ModelShape, index: int, matrices: Sequence[Matrix]
) -> LinearGroup:
    """Returns the matrices of k and v, or of the latent vector. matrices: the layer's, in loading order."""
    mixer = shape.loaded_layers[index].attention
    assert mixer is not None
    if isinstance(mixer, LatentAttentionShape):
        chosen, parts = matrices[1:2], [n.ATTN_KV_A_MQA] if mixer.input_bias else []
    else:
        assert isinstance(mixer, AttentionShape)
        # With gated q, its two matrices come after those of k and v.
        first = 0 if mixer.is_gated else 1
        chosen, parts = matrices[first : first + 2], [n.ATTN_K, n.ATTN_V] if mixer.qkv_bias else []
    names = [n.bias_of_layer(index, part) for part in parts]
    biases = [in_halves(shape, name, read_floats(source, name)) for name in names]
    return LinearGroup(list(chosen), biases or None)
