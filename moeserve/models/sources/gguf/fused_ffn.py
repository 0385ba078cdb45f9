"""A feed-forward's gate and up in one tensor (`ffn_up` with twice the rows: gate's, then up's; the same for a shared
expert's `ffn_up_shexp`), presented as the usual two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from . import names as n
from .header import MappedTensor
from .metadata import Metadata

# Part that may be fused -> the part that its first half is, and the key of the width.
_FUSED: Final = {
    n.FFN_UP: (n.FFN_GATE, "feed_forward_length"),
    n.FFN_UP_SHEXP: (n.FFN_GATE_SHEXP, "expert_shared_feed_forward_length"),
}


def gate_and_up(tensors: Iterable[MappedTensor], metadata: Metadata) -> Iterator[MappedTensor]:
    """Yields a file's tensors, with each fused matrix cut in two. A tensor of any other form is refused later, with all
    unexpected tensors."""
    held = list(tensors)
    names = {tensor.name for tensor in held}
    architecture = metadata.get("general.architecture")
    widths = {up: metadata.get(f"{architecture}.{key}") for up, (_, key) in _FUSED.items()}
    for tensor in held:
        layer = n.layer_of(tensor.name)
        up = next((up for up in _FUSED if layer is not None and tensor.name == n.of_layer(layer, up)), None)
        width = None if up is None else widths[up]
        if layer is None or up is None or not isinstance(width, int) or tensor.shape[0] != 2 * width:
            yield tensor
            continue
        gate = n.of_layer(layer, _FUSED[up][0])
        if gate in names:
            yield tensor
            continue
        half = tensor.nbytes // 2
        for name, offset in ((gate, 0), (tensor.name, half)):
            yield replace(
                tensor,
                name=name,
                shape=(width, *tensor.shape[1:]),
                nbytes=half,
                offset=tensor.offset + offset,
            )
