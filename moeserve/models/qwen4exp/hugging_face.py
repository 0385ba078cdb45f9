"""Folders of Qwen3.8-Flash-Next (https://huggingface.co/Qwen/Qwen3.8-Flash-Next), in bfloat16 and in 8-bit floats: the
text model of a multimodal one, or alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from moeserve.models.errors import SettingError
from moeserve.models.qwen_hybrid import SEPARATE_GATES, hybrid_mapping
from moeserve.models.sources.gguf import Metadata
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.delta_net import DELTA_LAYER, made_tensors
from moeserve.models.sources.huggingface.fused_rows import fused_rows
from moeserve.models.sources.huggingface.layer_settings import FULL, integer, layer_types
from moeserve.models.sources.huggingface.mapping import DECODER_LAYER, DECODER_QK_NORMS
from moeserve.models.sources.huggingface.remade import Remade, made_by, together
from moeserve.models.sources.huggingface.sharded_table import ngram_table

from .ngram_settings import head_offsets, head_rows, multipliers

LINEAR: Final = "linear_attention"
INDEXED: Final = "indexed_attention"  # transformers' name of the published files' "full_attention"
MOST_ROWS: Final = 1 << 32  # of a head


def derived(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, the kinds of layers, and the hashes of n-grams, from config.json. Raises
    ModelError."""
    layers = integer(path, config, "num_hidden_layers")
    types = layer_types(path, config, layers, (LINEAR, FULL, INDEXED))
    if types is None:
        period = integer(path, config, "full_attention_interval", 4)
        types = [LINEAR if (layer + 1) % period else INDEXED for layer in range(layers)]
    is_linear = np.array([each == LINEAR for each in types])
    ratio = integer(path, config, "indexer_compress_ratio")
    return {
        "attention.recurrent_layers": is_linear,
        "attention.compress_ratios": np.where(is_linear, 0, ratio).astype(np.int64),
        **_ngrams(path, config),
    }


def _ngrams(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    layers = config.get("ple_layer_ids")
    if not isinstance(layers, list) or len(layers) != 1 or type(layers[0]) is not int or layers[0] < 1:
        raise SettingError(
            path, f"'ple_layer_ids' is {layers!r:.80}; the number of one layer, from 1 on, is expected"
        )
    size = integer(path, config, "ngram_size", 3, low=2)
    per_order = integer(path, config, "heads_per_ngram", 8)
    if size > 16 or per_order > 256:
        raise SettingError(
            path,
            f"'ngram_size' and 'heads_per_ngram' are {size} and {per_order}; up to 16 and 256 are supported",
        )
    heads = (size - 1) * per_order
    width = integer(path, config, "ple_embed_dim", config.get("hidden_size"))
    if width % heads:
        raise SettingError(
            path, f"'ple_embed_dim' is {width}; a multiple of {heads}, the heads of n-grams, is expected"
        )
    least = config.get("ngram_vocab_size_base", 20_000_000)
    if type(least) is not int or not 2 <= least <= MOST_ROWS - MOST_ROWS // 256:
        raise SettingError(
            path,
            f"'ngram_vocab_size_base' is {least!r:.80}; 2 to {MOST_ROWS - MOST_ROWS // 256} is supported",
        )
    rows = head_rows(least, heads)
    factors = multipliers(
        integer(path, config, "seed", 1234, low=0), size, integer(path, config, "vocab_size")
    )
    return {
        "ple.layers": np.array([layers[0] - 1], np.int64),
        "ple.ngram_size": size,
        "ple.heads_per_ngram": per_order,
        "ple.head_vocab_sizes": np.array(rows, np.int64),
        "ple.head_offsets": np.array(head_offsets(rows), np.int64),
        "ple.layer_multipliers": np.array(factors, np.int64),
        "ple.eos_token_id": _end(path, config),
        "embedding_length_per_layer_input": width // heads,
    }


def _end(path: Path, config: Mapping[str, Any]) -> int:
    """Returns the token that ends n-grams: the first of those that end a text."""
    end = config.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    return integer(path, {"eos_token_id": end}, "eos_token_id", low=0)


def _index_rows(metadata: Metadata, _rows: int, _layer: int) -> tuple[int, int]:
    heads = metadata.require_int("qwen4exp.attention.indexer.head_count", 1, 1024)
    dim = metadata.require_int("qwen4exp.attention.indexer.key_length", 1, 1024)
    return heads * dim, dim


def _mixes(ours: str, theirs: str) -> dict[str, str]:
    parts = {
        "norm": "hc_norm",
        "down": "input_mix_weight_down",
        "up": "input_mix_weight_up",
        "inject": "block_inject_weight",
    }
    return {n.of_part(f"{ours}_{part}"): f"{theirs}.{name}.weight" for part, name in parts.items()}


_NGRAM_NORMS: Final = {
    n.of_part(n.PLE_NORM_QUERY): "ple.norm_query.weight",
    n.of_part(n.PLE_NORM_KEY): "ple.norm_key.weight",
    n.of_part(n.PLE_NORM_CONV): "ple.norm_conv.weight",
}
_NGRAMS: Final = {
    n.of_part(n.PLE_KEY): "ple.key_proj.weight",
    n.of_part(n.PLE_VALUE): "ple.value_proj.weight",
}
_INDEX_NORMS: Final = {
    n.of_part(n.INDEXER_Q_NORM): "self_attn.indexer.q_layernorm.weight",
    n.of_part(n.INDEXER_K_NORM): "self_attn.indexer.k_layernorm.weight",
}
_ATTENTION: Final = {
    name: theirs for name, theirs in DECODER_LAYER.items() if "self_attn" in theirs
} | DECODER_QK_NORMS
_STREAMS: Final = _mixes(n.HC_ATTN, "attn_hyper_connection") | _mixes(n.HC_FFN, "mlp_hyper_connection")
_HEAD: Final = {
    ours: f"model.{theirs}"
    for ours, theirs in _mixes(n.OUTPUT_HC, "hyper_connection_mixer").items()
    if "inject" not in ours
}
_OF_SOME_LAYERS: Final = _ATTENTION | _INDEX_NORMS | DELTA_LAYER | SEPARATE_GATES | _NGRAMS | _NGRAM_NORMS

MAPPING: Final = replace(
    hybrid_mapping(
        "qwen4_exp_text",
        SEPARATE_GATES,
        keys={
            "expert_weights_norm": ("norm_topk_prob",),
            "hyper_connection.count": ("hc_count",),
            "hyper_connection.low_rank": ("hc_lowrank",),
            "attention.indexer.head_count": ("indexer_n_heads",),
            "attention.indexer.key_length": ("indexer_head_dim",),
            "attention.indexer.top_k": ("indexer_budget",),
            "ple.conv_kernel": ("ple_conv_kernel_size",),
        },
        # setting: (the only supported value, transformers' default)
        fixed={"output_gate_type": ("sigmoid", None), "indexer_kv_heads": (1, None)},
        derived=derived,
        wrapped_in="qwen4_exp",  # the published form, with vision
        made=together(
            made_tensors,
            fused_rows("self_attn.indexer.index_qk_proj", (n.INDEXER_Q_PROJ, n.INDEXER_K_PROJ), _index_rows),
            made_by(
                Remade(n.of_part(n.PLE_CONV1D), "ple.conv1d.weight", lambda shape: (shape[0], shape[-1]))
            ),
        ),
        made_outside=ngram_table,
        metadata={n.SSM_GROUPED: True},
        rotates_in_sections=True,
    ),
    defaults={
        n.HAS_QKV_BIAS: False,
        "expert_weights_norm": True,
        "hyper_connection.count": 4,
        "hyper_connection.low_rank": 320,
        "ple.conv_kernel": 4,
    },
    layer=_OF_SOME_LAYERS | _STREAMS,
    outside=_HEAD,
    optional=frozenset({*_OF_SOME_LAYERS, n.OUTPUT_NORM}),
    # Norms of the streams, of q and k, of index keys and of n-grams; not the DeltaNet's.
    less_one=frozenset(
        {
            *(ours for ours in _STREAMS | _HEAD if "norm" in ours),
            *_NGRAM_NORMS,
            *_INDEX_NORMS,
            *DECODER_QK_NORMS,
        }
    ),
    next_token=None,  # this model's block (mtp) is another: it reads all streams
)
