"""Qwen3.8-Flash-Next (https://huggingface.co/Qwen/Qwen3.8-Flash-Next), text only. It differs from Qwen3.5-MoE: the
residual has several streams, whose mix replaces norms; the DeltaNet's output gate is a sigmoid; one layer adds n-gram
embeddings.

In attention layers, an indexer chooses the blocks of keys that a query attends to. The architecture implies that the
DeltaNet's gate is a sigmoid; no key says so.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moeserve.kernels.choice_rule import ChoiceRule
from moeserve.kernels.ngrams.hashing import NgramHashes
from moeserve.models.attention import AttentionShape
from moeserve.models.indexer import BlockIndexerShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.qwen_hybrid import read_hybrid_shape
from moeserve.models.recurrence import GatedDeltaNetShape
from moeserve.models.residual import HyperConnections, NgramShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource

from .hugging_face import MAPPING

TOKEN_BITS = 63  # bits of a token id times a multiplier


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported
    setting."""
    reader = ShapeReader(source)
    ngrams = _read_ngrams(source, reader)
    streams = HyperConnections(
        count=reader.integer("hyper_connection.count", 2, 16),
        low_rank=reader.integer("hyper_connection.low_rank", 1, 1 << 16),
    )
    is_tiled = not reader.flag(n.SSM_GROUPED, default=False)
    shape = read_hybrid_shape(reader, is_tiled=is_tiled, merged_gates=False)
    return replace(
        shape,
        layers=tuple(_layer(*each) for each in zip(shape.layers, _indexers(reader, shape), strict=True)),
        streams=streams,
        ngrams=ngrams,
    )


def _layer(layer: LayerShape, indexer: BlockIndexerShape | None) -> LayerShape:
    if isinstance(layer.mixer, AttentionShape):
        mixer = replace(layer.mixer, indexer=indexer)
        return replace(layer, mixer=mixer, unused=() if indexer is not None else n.BLOCK_INDEXER)
    assert isinstance(layer.mixer, GatedDeltaNetShape)
    heads = replace(layer.mixer.heads, sigmoid_gate=True)
    return replace(layer, mixer=replace(layer.mixer, heads=heads))


def _indexers(reader: ShapeReader, shape: ModelShape) -> list[BlockIndexerShape | None]:
    """Returns each layer's indexer; None for a layer that does not attend or attends to all keys. Like llama.cpp, takes
    a ratio of 0 to mean all keys; with some versions of transformers its converter writes 0 for all layers."""
    ratios = [
        ratio if layer.attention else 0
        for ratio, layer in zip(
            reader.layer_integers("attention.compress_ratios", 0, 1 << 16), shape.layers, strict=True
        )
    ]
    if len(set(ratios) - {0}) > 1:
        raise reader.error(
            "attention.compress_ratios", f"has {sorted(set(ratios))}; only one value beside 0 is supported"
        )
    num_heads = reader.integer("attention.indexer.head_count", 1, 1024)
    dim = reader.integer("attention.indexer.key_length", shape.heads.rotary_dim, 1024)
    top = reader.integer("attention.indexer.top_k", 1, 1 << 24)
    for ratio in set(ratios) - {0}:
        if top % ratio:
            raise reader.error(
                "attention.indexer.top_k",
                f"is {top}; a multiple of {ratio}, the keys of a block, is expected",
            )
    return [
        BlockIndexerShape(num_heads, dim, ChoiceRule(top // ratio, ratio)) if ratio else None
        for ratio in ratios
    ]


def _read_ngrams(source: ModelSource, reader: ShapeReader) -> NgramShape:
    size = reader.integer("ple.ngram_size", 2, 16)
    heads = (size - 1) * reader.integer("ple.heads_per_ngram", 1, 256)
    vocab = len(source.metadata.require_strings("tokenizer.ggml.tokens"))
    hashes = NgramHashes(
        multipliers=_numbers(source, reader, "ple.layer_multipliers", size, (1 << TOKEN_BITS) // vocab),
        head_rows=_numbers(source, reader, "ple.head_vocab_sizes", heads, 1 << 32),
        head_offsets=_numbers(source, reader, "ple.head_offsets", heads, 1 << 40, least=0),
        end_token=reader.integer("ple.eos_token_id", 0, vocab - 1),
    )
    (layer,) = _numbers(source, reader, "ple.layers", 1, reader.num_layers - 1, least=0)
    table = source.tensors.get(n.LAYER_INPUT_EMBD)
    rows = max(map(sum, zip(hashes.head_offsets, hashes.head_rows, strict=True)))
    if table is not None and len(table.shape) == 2:
        if table.shape[0] < rows:
            raise reader.error(
                "ple.head_offsets", f"reach row {rows} of {n.LAYER_INPUT_EMBD!r}, which has {table.shape[0]}"
            )
        rows = table.shape[0]
    width = reader.integer("embedding_length_per_layer_input", 1, 1 << 16)
    return NgramShape(layer, hashes, width, rows, reader.integer("ple.conv_kernel", 2, 16))


def _numbers(
    source: ModelSource, reader: ShapeReader, suffix: str, count: int, most: int, least: int = 1
) -> tuple[int, ...]:
    values = source.metadata.require_ints(f"{source.architecture}.{suffix}", count)
    for value in map(int, values):
        if not least <= value <= most:
            raise reader.error(suffix, f"has {value}; {least} to {most} is supported")
    return tuple(map(int, np.asarray(values)))


FAMILY = ModelFamily(architecture="qwen4exp", read_shape=read_shape, hugging_face=MAPPING)
