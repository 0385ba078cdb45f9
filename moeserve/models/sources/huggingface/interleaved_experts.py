"""gpt-oss's experts: one tensor for all experts of a layer, with alternating rows of gate and up, as floats or
MXFP4.

    gate_up_proj [E, hidden, 2 * ff], down_proj [E, ff, hidden]        floats, transposed
    gate_up_proj_blocks [E, 2 * ff, hidden / 32, 16], .._scales [E, 2 * ff, hidden / 32], and of down_proj likewise
    gate_up_proj_bias [E, 2 * ff], down_proj_bias [E, hidden]

Byte j of an MXFP4 block (https://arxiv.org/abs/2310.10537) holds values 2j and 2j + 1 in a checkpoint, and values j
and j + 16 in a GGUF, where the scale precedes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from moeserve.models.errors import SettingError
from moeserve.models.sources.gguf import names as n
from moeserve.quantization.table import MXFP4

from .fp4_weights import halves_of_pairs
from .made_tensor import Bytes, MadeTensor, bytes_of, find_tensor, numbers_of
from .safetensors_file import StoredTensor

BLOCK = 32  # values

GATE, UP, EVERY = slice(0, None, 2), slice(1, None, 2), slice(None)
_PARTS = (
    (n.FFN_GATE_EXPS, "gate_up_proj", GATE),
    (n.FFN_UP_EXPS, "gate_up_proj", UP),
    (n.FFN_DOWN_EXPS, "down_proj", EVERY),
)


def interleaved_experts(
    path: Path, prefix: str, stored: dict[str, StoredTensor]
) -> Iterator[tuple[str, MadeTensor]]:
    """Yields a layer's experts by GGUF's names within it, and removes them from `stored`. prefix:
    "model.layers.3.mlp.experts.". Raises ModelError for missing tensors or another form."""
    for ours, theirs, rows in _PARTS:
        bias = find_tensor(path, stored, f"{prefix}{theirs}_bias", 2)
        yield n.bias_of_part(ours), _made_bias(bias, rows)
        if f"{prefix}{theirs}_blocks" in stored:
            blocks = find_tensor(path, stored, f"{prefix}{theirs}_blocks", 4)
            scales = find_tensor(path, stored, f"{prefix}{theirs}_scales", 3)
            if blocks.shape != (*scales.shape, BLOCK // 2) or (blocks.dtype, scales.dtype) != ("U8", "U8"):
                raise SettingError(path, f"{prefix}{theirs}_blocks and its _scales do not fit one another")
            yield n.of_part(ours), _made_mxfp4(blocks, scales, rows)
        else:
            yield n.of_part(ours), _made_floats(find_tensor(path, stored, f"{prefix}{theirs}", 3), rows)
    for theirs in ("gate_up_proj", "down_proj"):
        for suffix in ("", "_blocks", "_scales", "_bias"):
            stored.pop(f"{prefix}{theirs}{suffix}", None)


def _made_bias(bias: StoredTensor, rows: slice) -> MadeTensor:
    experts, width = bias.shape
    return MadeTensor(
        (experts, len(range(width)[rows])),
        bias.float_type,
        (bias,),
        lambda: bytes_of(numbers_of(bias)[:, rows]),
    )


def _made_floats(matrices: StoredTensor, rows: slice) -> MadeTensor:
    experts, cols, out = matrices.shape
    return MadeTensor(
        (experts, len(range(out)[rows]), cols),
        matrices.float_type,
        (matrices,),
        lambda: bytes_of(numbers_of(matrices)[:, :, rows].transpose(0, 2, 1)),
    )


def _made_mxfp4(blocks: StoredTensor, scales: StoredTensor, rows: slice) -> MadeTensor:
    experts, out, groups = scales.shape

    def make() -> Bytes:
        pairs, exponents = numbers_of(blocks)[:, rows], numbers_of(scales)[:, rows]
        return bytes_of(np.concatenate([exponents[..., None], halves_of_pairs(pairs)], axis=-1))

    shape = (experts, len(range(out)[rows]), groups * BLOCK)
    return MadeTensor(shape, MXFP4, (blocks, scales), make)
