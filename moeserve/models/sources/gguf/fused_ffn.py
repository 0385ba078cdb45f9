"""A feed-forward's gate and up in one tensor (`ffn_up` with twice the rows: gate's, then up's), presented as the usual
two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from . import names as n
from .header import MappedTensor
from .metadata import Metadata


def gate_and_up(tensors: Iterable[MappedTensor], metadata: Metadata) -> Iterator[MappedTensor]:
    """Yields a file's tensors, with each fused matrix cut in two. A tensor of any other form is refused later, with all
    unexpected tensors."""
    held = list(tensors)
    names = {tensor.name for tensor in held}
    width = metadata.get(f"{metadata.get('general.architecture')}.feed_forward_length")
    for tensor in held:
        layer = n.layer_of(tensor.name)
        is_up = layer is not None and tensor.name == n.of_layer(layer, n.FFN_UP)
        if not is_up or not isinstance(width, int) or tensor.shape[0] != 2 * width:
            yield tensor
            continue
        assert layer is not None
        if n.of_layer(layer, n.FFN_GATE) in names:
            yield tensor
            continue
        half = tensor.nbytes // 2
        for part, offset in ((n.FFN_GATE, 0), (n.FFN_UP, half)):
            yield replace(
                tensor,
                name=n.of_layer(layer, part),
                shape=(width, *tensor.shape[1:]),
                nbytes=half,
                offset=tensor.offset + offset,
            )
