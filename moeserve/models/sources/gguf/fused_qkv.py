"""Attention's q, k and v in one tensor (`attn_qkv`, rows of q, then k, then v), presented as the usual three.

Layers whose `attn_qkv` belongs to a recurrence keep it: they have `ssm_*` tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from . import names as n
from .header import MappedTensor
from .metadata import Metadata

_PARTS = (n.ATTN_Q, n.ATTN_K, n.ATTN_V)
_FUSED = {of_part(n.ATTN_QKV): of_part for of_part in (n.of_part, n.bias_of_part)}


def qkv_rows(metadata: Metadata, rows: int, layer: int) -> tuple[int, int, int] | None:
    """Returns how many of the `rows` rows of a layer's fused matrix are q's, k's and v's; None if they do not fit the
    metadata. The number of KV heads follows from the rows, and must be the metadata's: the layer's own entry, if layers
    differ; for a layer behind the last entry (a next-token block) any layer's entry."""
    prefix = metadata.get("general.architecture")
    heads, width = (metadata.get(f"{prefix}.{key}") for key in ("attention.head_count", "embedding_length"))
    if not isinstance(heads, int) or not isinstance(width, int) or heads < 1:
        return None
    stated, dim, value_dim = (
        metadata.get(f"{prefix}.attention.{key}") for key in ("head_count_kv", "key_length", "value_length")
    )
    dim = width // heads if dim is None else dim
    value_dim = dim if value_dim is None else value_dim
    if not isinstance(dim, int) or not isinstance(value_dim, int) or dim < 1 or value_dim < 1:
        return None
    kv_heads, rest = divmod(rows - heads * dim, dim + value_dim)
    if isinstance(stated, np.ndarray):
        is_stated = kv_heads in (stated[layer : layer + 1] if layer < len(stated) else stated)
    else:
        is_stated = kv_heads == (heads if stated is None else stated)
    is_whole = rest == 0 and kv_heads >= 1
    return (heads * dim, kv_heads * dim, kv_heads * value_dim) if is_whole and is_stated else None


def divided(tensors: Iterable[MappedTensor], metadata: Metadata) -> Iterator[MappedTensor]:
    """Yields a file's tensors, with each fused matrix or bias of attention cut in three. A tensor of any other form is
    refused later, with all unexpected tensors."""
    held = list(tensors)
    recurrent = {n.layer_of(tensor.name) for tensor in held if ".ssm_" in tensor.name}
    for tensor in held:
        layer = n.layer_of(tensor.name)
        part_name = None if layer is None else _FUSED.get(tensor.name.removeprefix(n.in_layer(layer, "")))
        if layer is None or part_name is None or layer in recurrent:
            yield tensor
            continue
        rows = qkv_rows(metadata, tensor.shape[0], layer)
        if rows is None:
            yield tensor
            continue
        row_bytes, offset = tensor.nbytes // tensor.shape[0], tensor.offset
        for part, count in zip(_PARTS, rows, strict=True):
            yield replace(
                tensor,
                name=n.in_layer(layer, part_name(part)),
                shape=(count, *tensor.shape[1:]),
                nbytes=count * row_bytes,
                offset=offset,
            )
            offset += count * row_bytes
