"""Attention's q, k and v in one matrix of 8-bit floats that was quantised in parts, one for each GPU of a group, as
MiMo-V2.5 is published: the rows of each part are q's, then k's, then v's, and the scales' blocks begin anew in each.

No setting says how many parts there are. It follows from the number of scales: where a part's rows are not a whole
number of blocks, each part has one more block of scales than its whole blocks. A matrix whose parts are whole blocks
tells nothing; other layers' matrices then do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy.typing as npt

from moeserve.models.errors import SettingError
from moeserve.models.sources.gguf import Metadata
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.fused_qkv import qkv_rows

from .fp8_blocks import SCALE_SUFFIXES, block_size
from .fused_qkv import fused_qkv
from .fused_rows import layer_of
from .made_tensor import MadeTensor, rows_joined
from .remade import Made
from .safetensors_file import FP8, StoredTensor

_COUNTS: Final = (1, 2, 4, 8, 16, 32)  # of parts


def cut_in_parts(
    path: Path, stored: dict[str, StoredTensor], theirs: str, config: dict[str, Any]
) -> dict[str, StoredTensor]:
    """Returns the tensors, with each `theirs`.weight that has scales, and its scales, cut into parts: `theirs`.0.weight
    and so on. config: quantization_config. Raises ModelError if the scales do not tell the number of parts."""
    block = block_size(path, config)
    end = f"{theirs}.weight"
    found: dict[
        str, tuple[str, tuple[int, ...]]
    ] = {}  # the matrix's name -> its scales' name, possible counts
    for name, tensor in stored.items():
        if not name.endswith(end) or tensor.dtype != FP8 or len(tensor.shape) != 2 or block is None:
            continue
        scales = next((name + suffix for suffix in SCALE_SUFFIXES if name + suffix in stored), None)
        if scales is not None and len(stored[scales].shape) == 2:  # with_scales says what is missing
            found[name] = scales, _counts(tensor.shape[0], stored[scales].shape[0], block[0])
    if not found:
        return stored
    counts = [one for one in _COUNTS if all(one in possible for _, possible in found.values())]
    if len(counts) != 1:
        first = next(iter(found))
        raise SettingError(
            path,
            f"tensor {first!r} was quantised in parts, and its scales fit {counts or 'no number'} of parts; "
            "use a GGUF file of the model",
        )
    (count,) = counts
    cut = dict(stored)
    for name, (scales, _) in found.items():
        for part in range(count):
            at = f"{name.removesuffix('weight')}{part}.weight"
            cut[at] = _part(stored[name], at, part, count)
            of_part = at + scales.removeprefix(name)
            cut[of_part] = _part(stored[scales], of_part, part, count)
        del cut[name], cut[scales]
    return cut


def _counts(rows: int, blocks: int, block_rows: int) -> tuple[int, ...]:
    return tuple(
        one for one in _COUNTS if rows % one == 0 and blocks == one * -(-(rows // one) // block_rows)
    )


def _part(tensor: StoredTensor, name: str, part: int, count: int) -> StoredTensor:
    rows, nbytes = tensor.shape[0] // count, (tensor.end - tensor.start) // count
    start = tensor.start + part * nbytes
    return replace(tensor, name=name, shape=(rows, *tensor.shape[1:]), start=start, end=start + nbytes)


def ranked_qkv(theirs: str) -> Made:
    """Returns a function that makes q, k and v of the parts of `theirs`, within a layer, or of `theirs`.weight."""
    whole = fused_qkv(theirs)

    def made(
        path: Path, prefix: str, metadata: Metadata, stored: dict[str, StoredTensor]
    ) -> Iterator[tuple[str, MadeTensor]]:
        parts: list[StoredTensor] = []
        while (part := stored.pop(f"{prefix}{theirs}.{len(parts)}.weight", None)) is not None:
            parts.append(part)
        if not parts:
            yield from whole(path, prefix, metadata, stored)
            return
        if any(len(part.shape) != 2 or part.shape != parts[0].shape for part in parts):
            raise SettingError(path, f"tensor {prefix + theirs!r} has parts of different shapes")
        if any(part.dtype != parts[0].dtype for part in parts):
            raise SettingError(path, f"tensor {prefix + theirs!r} has parts of different dtypes")
        count, (rows, cols) = len(parts), parts[0].shape
        sizes = qkv_rows(metadata, rows * count, layer_of(prefix))
        if sizes is None or any(size % count for size in sizes):
            raise SettingError(
                path, f"tensor {prefix + theirs!r} has {rows * count} rows in {count} parts, which do not fit"
            )
        ends = list(accumulate(size // count for size in sizes))
        for ours, size, end in zip((n.ATTN_Q, n.ATTN_K, n.ATTN_V), sizes, ends, strict=True):
            yield n.of_part(ours), rows_joined(tuple(parts), (size, cols), _rows(end - size // count, end))

    return made


def _rows(first: int, end: int) -> Callable[[npt.NDArray[Any]], npt.NDArray[Any]]:
    return lambda rows: rows[first:end]
