"""Converts integer matrices of 2, 3, 4 and 8 bits with a scale and a zero point per group of columns to the engine's
own block types: w = s * (q - z), without rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from moeserve.models.errors import SettingError
from moeserve.quantization import QuantType, StoredScales
from moeserve.quantization.table import Q4_0, Q8_0, ZERO_TYPES

from .bit_stream import packed_bits, unpacked_bits
from .safetensors_file import PackedWeight, StoredTensor, stored_numbers

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

GROUP = 32
# Blocks of `GROUP` columns for codes whose zero point is the middle, by bits: a byte less than with a zero point.
CENTERED_TYPES = {4: Q4_0, 8: Q8_0}


@dataclass(frozen=True, slots=True)
class Integers:
    """A quantised matrix with integer codes, scales and zero points by group of columns, from which GGUF blocks are
    built."""

    codes: Bytes  # unsigned [rows, cols * bits / 8], in column order from the lowest bits
    scales: npt.NDArray[Any]  # [rows, groups], float16, float32 or the bits of bfloat16
    zeros: Bytes  # [rows, groups], unsigned as the codes
    is_bfloat16: bool = False  # scales of 16 bits


def integer_matrix(
    first: StoredTensor,
    name: str,
    shape: tuple[int, int],
    bits: int,
    scales: StoredTensor,
    groups: int,
    sources: tuple[StoredTensor, ...],
    read: Callable[[], Integers],
    order: npt.NDArray[np.int32] | None = None,
    *,
    has_zeros: bool = True,
    are_halves: Callable[[], bool] = lambda: False,
) -> StoredTensor:
    """Returns the matrix [rows, cols] under the name that it has in a float checkpoint. first: the tensor of codes.
    groups: number of groups per row, each of which has a scale. order: the order of the columns that `read` returns,
    see PackedWeight.order. has_zeros: False if every zero point is the middle of the codes. are_halves: whether
    bfloat16 scales are float16 numbers too, in all matrices that may become parts of one. Raises ModelError for formats
    that no block type can hold."""
    kind = _kind_of(first, shape[1], bits, scales, groups)
    is_centered = not has_zeros and bits in CENTERED_TYPES and kind.block_columns == GROUP
    if is_centered and (_stored_scales(scales, is_half=False) == StoredScales.F16_ZERO or are_halves()):
        kind = CENTERED_TYPES[bits]

    def made() -> Bytes:
        return _blocks(kind, shape, bits, replace(read(), is_bfloat16=scales.dtype == "BF16"))

    packed = PackedWeight(kind, made, sources, order)
    place = (first.start, first.end, first.buffer, first.version)
    return StoredTensor(first.path, name, shape, first.dtype, *place, packed=packed)


def _kind_of(first: StoredTensor, cols: int, bits: int, scales: StoredTensor, groups: int) -> QuantType:
    if bits not in (2, 3, 4, 8):
        raise SettingError(
            first.path, f"tensor {first.name!r} has codes of {bits} bits; only 2, 3, 4 and 8 are supported"
        )
    if groups < 1 or cols < 1 or cols % groups:
        raise SettingError(
            first.path, f"tensor {first.name!r} has {cols} columns, which {groups} groups do not divide"
        )
    stored = _stored_scales(scales, is_half=bits < 4)
    widths = sorted((c for b, c, s in ZERO_TYPES if (b, s) == (bits, stored)), reverse=True)
    width = next((width for width in widths if gcd(cols, cols // groups) % width == 0), None)
    if width is None:
        raise SettingError(
            first.path,
            f"tensor {first.name!r} has {cols} columns in groups of {cols // groups}; multiples of {widths[-1]} are "
            "supported",
        )
    return ZERO_TYPES[bits, width, stored]


def _stored_scales(scales: StoredTensor, *, is_half: bool) -> StoredScales:
    """Returns the format in which a block stores the scales. is_half: only float16 is allowed. Raises ModelError for
    scales that these 16 bits cannot hold exactly."""
    if scales.dtype == "F16":
        return StoredScales.F16_ZERO
    if scales.dtype == "BF16" and not is_half:
        return StoredScales.BF16_ZERO
    if scales.dtype in ("F32", "BF16"):
        values = _float_bits(stored_numbers(scales))
        with np.errstate(over="ignore"):
            if (values.view(np.float32).astype(np.float16).astype(np.float32).view("<u4") == values).all():
                return StoredScales.F16_ZERO
        if not is_half and not (values & 0xFFFF).any():
            return StoredScales.BF16_ZERO
    raise SettingError(
        scales.path, f"tensor {scales.name!r} has scales of {scales.dtype} that 16 bits do not hold"
    )


def are_float16(scales: StoredTensor) -> bool:
    """Returns whether these bfloat16 numbers are float16 numbers too: they are unless very small or large."""
    values = _float_bits(stored_numbers(scales)).view(np.float32)
    with np.errstate(over="ignore"):
        return bool((values.astype(np.float16).astype(np.float32) == values).all())


def _blocks(kind: QuantType, shape: tuple[int, int], bits: int, integers: Integers) -> Bytes:
    """Returns the blocks, uint8 [rows, row bytes]."""
    layout = kind.layout
    assert layout is not None
    rows, cols = shape
    count = cols // kind.block_columns
    each = count // integers.scales.shape[1]  # blocks per group
    out = np.empty((rows, count, kind.block_bytes), np.uint8)
    scales = _as_16_bits(integers.scales, layout.stored_scales, is_bfloat16=integers.is_bfloat16)
    out[..., :2] = np.ascontiguousarray(scales.repeat(each, axis=1))[..., None].view(np.uint8)
    codes = integers.codes.reshape(rows, count, -1)
    if kind is Q4_0:  # its bytes have columns j and j + 16
        nibbles = codes & np.uint8(15), codes >> np.uint8(4)  # of even and of odd columns
        for odd, each_column in enumerate(nibbles):
            out[..., 2 + odd :: 2] = each_column[..., :8] | each_column[..., 8:] << np.uint8(4)
    elif kind is Q8_0:
        out[..., 2:] = codes ^ np.uint8(0x80)
    else:
        out[..., 2] = integers.zeros.repeat(each, axis=1)
        out[..., 3:] = _behind_zeros(bits, codes)
    return out.reshape(rows, -1)


def _behind_zeros(bits: int, codes: Bytes) -> Bytes:
    """Returns the codes as blocks store them behind the zero point, uint8 [rows, blocks, bytes]."""
    if bits == 8:
        return codes ^ np.uint8(0x80)
    if bits != 3:
        return codes
    each = unpacked_bits(codes, bits)
    parts = packed_bits(each & np.uint8(3), 2), packed_bits(each >> np.uint8(2), 1)
    return np.concatenate(parts, axis=-1)


def _float_bits(scales: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """Returns the bits of float32 or bfloat16 numbers, converted to float32's bits."""
    return scales.astype(np.uint32) << np.uint32(0 if scales.dtype.itemsize == 4 else 16)


def _as_16_bits(
    scales: npt.NDArray[Any], stored: StoredScales, *, is_bfloat16: bool
) -> npt.NDArray[np.uint16]:
    if scales.dtype.itemsize == 2 and (not is_bfloat16 or stored == StoredScales.BF16_ZERO):
        return scales.view(np.uint16)
    scales = _float_bits(scales)
    if stored == StoredScales.BF16_ZERO:
        return (scales.view(np.uint32) >> 16).astype(np.uint16)
    return scales.view(np.float32).astype(np.float16).view(np.uint16)
