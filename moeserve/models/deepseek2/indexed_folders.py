"""How to read folders of GLM-5 and DeepSeek-V3.2: like DeepSeek-V3's, with an indexer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moeserve.models.deepseek2.hugging_face import MAPPING
from moeserve.models.errors import SettingError
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.latent import derived

KINDS = {"full": True, "shared": False, "F": True, "S": False}  # whether the layer has an indexer of its own

_TENSORS = {
    n.of_part(n.INDEXER_K): "self_attn.indexer.wk.weight",
    n.of_part(n.INDEXER_Q_B): "self_attn.indexer.wq_b.weight",
    n.of_part(n.INDEXER_PROJ): "self_attn.indexer.weights_proj.weight",
    n.of_part(n.INDEXER_K_NORM): "self_attn.indexer.k_norm.weight",
    n.bias_of_part(n.INDEXER_K_NORM): "self_attn.indexer.k_norm.bias",
}


def _with_indexer_types(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Adds the list of layers that have an indexer of their own, from `indexer_types`, `index_topk_pattern`, or
    `index_topk_freq` (every such layer after the first ones). Raises ModelError."""
    values, layers = derived(path, config), config.get("num_hidden_layers")
    kinds = config.get("indexer_types") or config.get("index_topk_pattern")
    if kinds is None:
        period, first = config.get("index_topk_freq") or 1, config.get("index_skip_topk_offset", 2)
        if not (
            isinstance(layers, int) and isinstance(period, int) and isinstance(first, int) and period > 0
        ):
            raise SettingError(
                path,
                f"'index_topk_freq' is {period!r} and 'index_skip_topk_offset' {first!r}; only numbers are supported",
            )
        kinds = ["full" if max(i - first + 1, 0) % period == 0 else "shared" for i in range(layers)]
    if not isinstance(kinds, list | str) or len(kinds) != layers or any(kind not in KINDS for kind in kinds):
        raise SettingError(
            path, f"'indexer_types' is {kinds!r}; only 'full' or 'shared' for each layer is supported"
        )
    return values | {n.INDEXER_TYPES: np.array([KINDS[kind] for kind in kinds], np.bool_)}


DEEPSEEK_MAPPING = replace(
    MAPPING,
    model_type="deepseek_v32",
    other_model_types=(),
    keys={
        **MAPPING.keys,
        "attention.indexer.head_count": ("index_n_heads",),
        "attention.indexer.key_length": ("index_head_dim",),
        "attention.indexer.top_k": ("index_topk",),
    },
    layer={**MAPPING.layer, **_TENSORS},
)
GLM_MAPPING = replace(
    DEEPSEEK_MAPPING,
    model_type="glm_moe_dsa",
    optional=MAPPING.optional | frozenset(_TENSORS),
    derived=_with_indexer_types,
)
