"""Attention's q, k and v in one tensor (`attn_qkv`, rows of q, then k, then v), presented as the usual three.

Layers whose `attn_qkv` belongs to a recurrence keep it: they have `ssm_*` tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from . import names as n
from .header import MappedTensor
from .metadata import Metadata

_PARTS = (n.ATTN_Q, n.ATTN_K, n.ATTN_V)
_FUSED = {of_part(n.ATTN_QKV): of_part for of_part in (n.of_part, n.bias_of_part)}


def qkv_rows(metadata: Metadata) -> tuple[int, int, int] | None:
    """Returns the numbers of rows of q, k and v; None if the metadata does not say them with one number each."""
    prefix = metadata.get("general.architecture")
    heads, width = (metadata.get(f"{prefix}.{key}") for key in ("attention.head_count", "embedding_length"))
    if not isinstance(heads, int) or not isinstance(width, int) or heads < 1:
        return None
    kv_heads = metadata.get(f"{prefix}.attention.head_count_kv")
    dim = metadata.get(f"{prefix}.attention.key_length")
    kv_heads, dim = heads if kv_heads is None else kv_heads, width // heads if dim is None else dim
    if not isinstance(kv_heads, int) or not isinstance(dim, int):
        return None
    return heads * dim, kv_heads * dim, kv_heads * dim


def divided(tensors: Iterable[MappedTensor], metadata: Metadata) -> Iterator[MappedTensor]:
    """Yields a file's tensors, with each fused matrix or bias of attention cut in three. A tensor of any other form is
    refused later, with all unexpected tensors."""
    held = list(tensors)
    recurrent = {n.layer_of(tensor.name) for tensor in held if ".ssm_" in tensor.name}
    rows = qkv_rows(metadata)
    for tensor in held:
        layer = n.layer_of(tensor.name)
        part_name = _FUSED.get("" if layer is None else tensor.name.removeprefix(n.in_layer(layer, "")))
        if part_name is None or layer in recurrent or rows is None or sum(rows) != tensor.shape[0]:
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
