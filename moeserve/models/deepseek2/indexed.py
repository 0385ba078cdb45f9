"""GLM-5 (https://huggingface.co/zai-org/GLM-5) and DeepSeek-V3.2 (https://huggingface.co/deepseek-ai/DeepSeek-V3.2):
DeepSeek's latent attention to the keys that an indexer chooses (https://arxiv.org/abs/2512.02556).

GLM-5 rotates pairs of neighbours in the indexer, and some of its layers use the keys that an earlier layer's indexer
chose.
"""

from __future__ import annotations

from dataclasses import replace

from moeserve.models.deepseek2.family import read_shape as read_latent_shape
from moeserve.models.deepseek2.indexed_folders import DEEPSEEK_MAPPING, GLM_MAPPING
from moeserve.models.indexer import IndexerShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.latent import LatentAttentionShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource


def read_glm(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported
    setting."""
    return _read(source, in_pairs=True)


def read_deepseek(source: ModelSource) -> ModelShape:
    """Reads DeepSeek-V3.2's shape from the metadata. Raises ModelError for a missing or unsupported setting."""
    return _read(source, in_pairs=False)


def _read(source: ModelSource, *, in_pairs: bool) -> ModelShape:
    shape, reader = read_latent_shape(source), ShapeReader(source)
    latent = shape.heads
    assert isinstance(latent, LatentAttentionShape)
    if latent.q_rank == 0:
        raise reader.error("attention.q_lora_rank", "is missing or 0; the indexer's queries are made from it")
    indexer = IndexerShape(
        num_heads=reader.integer("attention.indexer.head_count", 1, 1024),
        dim=reader.integer("attention.indexer.key_length", latent.rotary_dim, 1024),
        top=reader.integer("attention.indexer.top_k", 1, 1 << 24),
        in_pairs=in_pairs,
    )
    layers = zip(shape.layers, _choosing_layers(reader), strict=True)
    return replace(shape, layers=tuple(_indexed(layer, indexer, index) for layer, index in layers))


def _choosing_layers(reader: ShapeReader) -> list[int | None]:
    """Returns, for each layer, the earlier layer whose choice of keys it uses; None: the layer has an indexer of its
    own."""
    has_own = reader.flags(n.INDEXER_TYPES) if reader.has(n.INDEXER_TYPES) else [True] * reader.num_layers
    if not has_own[0]:
        raise reader.error(n.INDEXER_TYPES, "begins with a layer that has no indexer, nor an earlier one")
    found: list[int | None] = []
    last = 0
    for index, own in enumerate(has_own[: reader.num_layers]):
        last = index if own else last
        found.append(None if own else last)
    return found


def _indexed(layer: LayerShape, indexer: IndexerShape, keys_from: int | None) -> LayerShape:
    assert isinstance(layer.mixer, LatentAttentionShape)
    mixer = replace(layer.mixer, indexer=replace(indexer, keys_from=keys_from))
    return replace(layer, mixer=mixer, unused=() if keys_from is None else n.INDEXER)


GLM_FAMILY = ModelFamily("glm-dsa", read_glm, GLM_MAPPING, has_next_token_block=True)
DEEPSEEK_FAMILY = ModelFamily("deepseek32", read_deepseek, DEEPSEEK_MAPPING, has_next_token_block=True)
