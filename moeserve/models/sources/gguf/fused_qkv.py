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


def qkv_rows(metadata: Metadata, rows: int) -> tuple[int, int, int] | None:
    """Returns how many of this number of rows are q's, k's and v's; None if the metadata does not fit. Layers may
    differ in their KV heads, which are counted by the rows."""
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
    is_stated = isinstance(stated, np.ndarray) or kv_heads == (heads if stated is None else stated)
    is_whole = rest == 0 and kv_heads >= 1
    return (heads * dim, kv_heads * dim, kv_heads * value_dim) if is_whole and is_stated else None


def divided(tensors: Iterable[MappedTensor], metadata: Metadata) -> Iterator[MappedTensor]:
    """Yields a file's tensors, with each fused matrix or bias of attention cut in three. A tensor of any other form is
    refused later, with all unexpected tensors."""
    held = list(tensors)
    recurrent = {n.layer_of(tensor.name) for tensor in held if ".ssm_" in tensor.name}
    for tensor in held:
        layer = n.layer_of(tensor.name)
        part_name = _FUSED.get("" if layer is None else tensor.name.removeprefix(n.in_layer(layer, "")))
        is_fused = part_name is not None and layer not in recurrent
        rows = qkv_rows(metadata, tensor.shape[0]) if is_fused else None
        if part_name is None or rows is None:
            yield tensor
            continue
        assert layer is not None
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
