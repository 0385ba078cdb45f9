"""What a row means, in numpy: the values of GGUF blocks, bit for bit what ggml's dequantisation gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moeserve.quantization.quant_type import BitField, BlockLayout, QuantType, StoredScales

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = npt.NDArray[np.float32]


def dequantize(kind: QuantType, data: Bytes) -> Floats:
    """uint8 bytes of whole blocks, of any shape, to float32 [values]."""
    flat = np.ascontiguousarray(data).reshape(-1)
    if kind.layout is None:
        if kind.float_name == "bfloat16":
            return (flat.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return flat.view(kind.float_name).astype(np.float32)
    blocks = flat.reshape(-1, kind.block_bytes)
    layout = kind.layout
    numbers = _numbers(layout, blocks, kind.block_columns).reshape(len(blocks), -1, layout.group)
    scales, mins = _scales(layout, blocks)
    values = scales[..., None] * (numbers - np.float32(layout.offset))
    return (values if mins is None else values - mins[..., None]).reshape(-1)


def _numbers(layout: BlockLayout, b: Bytes, columns: int) -> Floats:
    """What codes stand for, the offset not yet subtracted: [blocks, columns]."""
    codes = _field(layout.low, b, columns)
    if layout.high is not None:
        codes = codes | _field(layout.high, b, columns) << np.uint8(layout.low_bits)
    if layout.table is not None:
        return np.array(layout.table.levels, np.float32)[codes]
    return (codes.view(np.int8) if layout.low_bits == 8 else codes).astype(np.float32)


def _field(field: BitField, b: Bytes, columns: int) -> Bytes:
    runs = b[:, field.at : field.at + field.nbytes(columns)].reshape(len(b), -1, 1, field.width)
    shifts = np.arange(0, 8, field.bits, dtype=np.uint8)[:, None]
    codes = (runs >> shifts) & np.uint8((1 << field.bits) - 1)
    return codes.reshape(len(b), -1).view(np.uint8)


def _scales(layout: BlockLayout, b: Bytes) -> tuple[Floats, Floats | None]:
    """s and m of every group: [blocks, groups]."""
    end = layout.halves_at + 2 * layout.halves
    halves = np.ascontiguousarray(b[:, layout.halves_at : end]).view(np.float16).astype(np.float32)
    octets = b[:, layout.octets_at : layout.octets_at + layout.octets]
    stored = layout.stored_scales
    if stored == StoredScales.F16:
        return halves, None
    if stored == StoredScales.F16_MIN:
        return halves[:, :1], -halves[:, 1:]
    if stored == StoredScales.E8M0:
        return np.ldexp(np.float32(1), octets.astype(np.int32) - 128).astype(np.float32), None
    d, dmin = halves[:, :1], halves[:, 1:]
    if stored == StoredScales.NIBBLE_MIN:
        return d * (octets & 15).astype(np.float32), dmin * (octets >> 4).astype(np.float32)
    if stored == StoredScales.SIX_BIT_MIN:
        first, second, third = octets[:, :4], octets[:, 4:8], octets[:, 8:]
        scales = np.hstack([first & 63, (third & 15) | first >> 6 << 4])
        mins = np.hstack([second & 63, third >> 4 | second >> 6 << 4])
        return d * scales.astype(np.float32), dmin * mins.astype(np.float32)
    return d * _signed_scales(stored, octets).astype(np.float32), None


def _signed_scales(stored: StoredScales, octets: Bytes) -> npt.NDArray[np.int8]:
    if stored == StoredScales.I8:
        return np.ascontiguousarray(octets).view(np.int8)
    if stored == StoredScales.SIX_BIT_Q3_K:
        low = np.hstack([octets[:, :8] & 15, octets[:, :8] >> 4])
        high = np.hstack([octets[:, 8:] >> shift & 3 for shift in (0, 2, 4, 6)])
    else:
        low = np.stack([octets[:, 2:] & 15, octets[:, 2:] >> 4], axis=-1).reshape(len(octets), -1)
        high = np.stack([octets[:, :2] >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1).reshape(
            len(octets), -1
        )
    scales: npt.NDArray[np.int8] = (low | high << 4).astype(np.int8) - np.int8(32)
    return scales
