"""Checkpoints with 8-bit float matrices, whose scales are in `<name>_scale_inv` or `<name>_scale`: one per block
(DeepSeek-V3's form, https://arxiv.org/abs/2412.19437), per row, or per matrix. A layer's experts may be one tensor.
DeepSeek-V4's scales are powers of two beside `weight`, in `scale`; its experts are in fp4_weights.py.

A matrix is kept in 8 bits, without rounding: as blocks of a float32 scale and 8-bit floats. It is read as bfloat16
instead if its columns, or its scales' blocks, are not multiples of 32, or if single values are asked for."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moeserve.models.errors import ModelError, SettingError
from moeserve.quantization import QuantType
from moeserve.quantization.reference import e4m3_values
from moeserve.quantization.table import FP8_TYPES

from .safetensors_file import EXPONENTS, FP8, PackedWeight, StoredTensor, stored_numbers

_SHARD = re.compile(r".*\.shard_(0|[1-9]\d{0,5})\.weight")
SCALE_SUFFIXES = ("_scale_inv", "_scale")
_EXPONENT_BIAS = 127


def with_scales(
    path: Path, stored: dict[str, StoredTensor], config: dict[str, Any]
) -> dict[str, StoredTensor]:
    """Returns the tensors, with the scales of each 8-bit float matrix attached to it instead of beside it; parts of a
    table are left to sharded_table.py. config: quantization_config. Raises ModelError for scales that are missing or
    whose blocks do not fit."""
    block = block_size(path, config)
    found = dict(stored)
    for name, tensor in stored.items():
        if tensor.dtype != FP8 or is_shard(name):
            continue
        beside = name.removesuffix("weight") + "scale"
        names = (*(name + end for end in SCALE_SUFFIXES), beside)
        scales = next((found.pop(each) for each in names if each in found), None)
        if scales is None:
            raise ModelError(
                path, f"tensor {name + SCALE_SUFFIXES[0]!r} is missing; download the whole repository"
            )
        whole = replace(tensor, scales=scales, block=_block(path, tensor, scales, block))
        found[name] = replace(whole, packed=_blocks_of(whole))
    return found


def is_shard(name: str) -> bool:
    """Returns whether this is the name of a part of a table that is stored in parts."""
    return _SHARD.fullmatch(name) is not None


def _blocks_of(tensor: StoredTensor) -> PackedWeight | None:
    """Returns the matrix as blocks of 8-bit floats; None if no type has blocks into which its columns divide."""
    assert tensor.scales is not None
    cols = gcd(tensor.shape[-1], tensor.block[1])
    kind = next((row for width, row in sorted(FP8_TYPES.items(), reverse=True) if cols % width == 0), None)
    if kind is None:
        return None
    return PackedWeight(kind, lambda: _as_blocks(kind, tensor), (replace(tensor, scales=None), tensor.scales))


def _as_blocks(kind: QuantType, tensor: StoredTensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns uint8 [(matrices,) rows, row bytes]."""
    rows, cols = tensor.shape[-2:]
    width = kind.block_columns
    scales = _row_scales(tensor)[:, :, np.arange(0, cols, width) // tensor.block[1]]
    out = np.empty((len(scales), rows, cols // width, kind.block_bytes), np.uint8)
    out[..., :4] = np.ascontiguousarray(scales)[..., None].view(np.uint8)
    out[..., 4:] = stored_numbers(tensor).reshape(len(scales), rows, -1, width)
    return out.reshape(*tensor.shape[:-1], -1)


def _row_scales(tensor: StoredTensor) -> npt.NDArray[np.float32]:
    """Returns the scales of each row: [matrices, rows, blocks of columns]."""
    assert tensor.scales is not None
    rows, cols = tensor.shape[-2:]
    blocks = -(-rows // tensor.block[0]), -(-cols // tensor.block[1])
    scales = scale_values(tensor.scales).reshape(-1, *blocks)  # one matrix's, or one scale for all
    scales = np.broadcast_to(scales, (math.prod(tensor.shape[:-2]), *blocks))
    return scales.repeat(tensor.block[0], axis=1)[:, :rows]


def block_size(path: Path, config: dict[str, Any]) -> tuple[int, int] | None:
    """Returns the block size (rows, columns) in the settings; None if they have none."""
    block = config.get("weight_block_size")
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        block = (weights.get("block_structure") if isinstance(weights, dict) else None) or block
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise SettingError(
            path, f"quantization_config has weight_block_size {block!r}; two numbers are expected"
        )
    return block[0], block[1]


def _block(
    path: Path, tensor: StoredTensor, scales: StoredTensor, block: tuple[int, int] | None
) -> tuple[int, int]:
    """Returns the rows and columns of a matrix that share a scale. tensor: one matrix, or the matrices of all
    experts."""
    stated = scales.dtype in ("F32", "BF16", "F16", EXPONENTS) and len(tensor.shape) in (2, 3)
    if stated:
        outer, (rows, cols) = tensor.shape[:-2], tensor.shape[-2:]
        if block is not None and scales.shape == (*outer, -(-rows // block[0]), -(-cols // block[1])):
            return block
        if math.prod(scales.shape) == 1 or (outer and scales.shape in (outer, (*outer, 1), (*outer, 1, 1))):
            return rows, cols
        if scales.shape in ((*outer, rows), (*outer, rows, 1)):
            return 1, cols
        if outer and scales.shape == (*outer, 1, cols):  # of matrices that are stored as [in, out]
            return rows, 1
    expected = "one, one for each row, or one for each block is expected"
    if block is not None and stated:
        sizes = zip(tensor.shape[-2:], block, strict=True)
        blocks = [*tensor.shape[:-2], *(-(-size // n) for size, n in sizes)]
        expected = f"F32 {blocks} is expected from the matrix it is for"
    raise SettingError(path, f"tensor {scales.name!r} is {scales.dtype} {list(scales.shape)}; {expected}")


def dequantized(tensor: StoredTensor) -> npt.NDArray[np.uint16]:
    """Returns scaled matrices as the bits of bfloat16, in their shape, rounded to nearest."""
    scales = _row_scales(tensor).repeat(tensor.block[1], axis=2)[:, :, : tensor.shape[-1]]
    values = e4m3_values(stored_numbers(tensor)) * scales.reshape(tensor.shape)
    return bfloat16_bits(values)


def bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Returns the values as the bits of bfloat16, rounded to nearest."""
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    numbers: npt.NDArray[np.uint16] = rounded.astype(np.uint16)
    return numbers


def scale_values(scales: StoredTensor) -> npt.NDArray[np.float32]:
    """Returns scales as float32, in their shape."""
    numbers = stored_numbers(scales)
    if scales.dtype == EXPONENTS:
        return np.ldexp(np.float32(1), numbers.astype(np.int32) - _EXPONENT_BIAS)
    if scales.dtype == "BF16":
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.view(np.float32 if scales.dtype == "F32" else np.float16).astype(np.float32)
