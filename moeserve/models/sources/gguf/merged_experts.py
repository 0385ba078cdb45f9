"""Renames and splits tensors that some files have under another name or in another form than most files.

Some files have the experts' gate and up in one tensor, gate's rows first (`--fuse-gate-up-exps` of llama.cpp's
converter, https://github.com/ggml-org/llama.cpp/pull/19139). The tensor is presented as the usual two tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from . import names as n
from .header import MappedTensor

_MERGED = {
    of_part(n.FFN_GATE_UP_EXPS): (of_part(n.FFN_GATE_EXPS), of_part(n.FFN_UP_EXPS))
    for of_part in (n.of_part, n.bias_of_part)
}


def separated(tensors: Iterable[MappedTensor]) -> Iterator[MappedTensor]:
    """Yields a file's tensors, with each merged tensor split in two: weights [E, 2 * ff, hidden], biases [E, 2 *
    ff]."""
    for tensor in tensors:
        layer = n.layer_of(tensor.name)
        if tensor.name == n.LFM2_OUTPUT_NORM:
            yield replace(tensor, name=n.OUTPUT_NORM)
            continue
        # Files of Hunyuan 3 have this name.
        if layer is not None and tensor.name == n.in_layer(layer, n.EXP_PROBS_B):
            yield replace(tensor, name=n.bias_of_layer(layer, n.EXP_PROBS_B))
            continue
        # Files of Falcon-H1 have this name.
        if layer is not None and tensor.name == n.in_layer(layer, n.FFN_NORM):
            yield replace(tensor, name=n.of_layer(layer, n.FFN_NORM))
            continue
        parts = () if layer is None else _MERGED.get(tensor.name.removeprefix(n.in_layer(layer, "")), ())
        if not parts or len(tensor.shape) < 2 or tensor.shape[1] % 2:
            yield tensor  # a tensor of any other form is refused later, with all unexpected tensors
            continue
        assert layer is not None
        experts, rows, *cols = tensor.shape
        for half, part in enumerate(parts):
            yield replace(
                tensor,
                name=n.in_layer(layer, part),
                shape=(experts, rows // 2, *cols),
                nbytes=tensor.nbytes // 2,
                half=half,
            )
