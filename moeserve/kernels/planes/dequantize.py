"""What planes mean, in plain torch on any device: the reference of every kernel that reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.kernels.planes.formats import (
    FIELD,
    FORMATS,
    LEVELS,
    UNIT,
    Format,
    Planes,
    Scale,
    Table,
)


def dequantize(planes: Planes, expert: int | None = None) -> Tensor:
    """float32 [rows, cols] of one expert, or [experts, rows, cols]; bit for bit what ggml's dequantisation gives."""
    if expert is None:
        return torch.stack([dequantize(planes, e) for e in range(planes.experts)])
    if not planes.quantised:
        return planes.codes[expert].float()
    f = FORMATS[planes.type]
    codes = _codes(f, planes.codes[expert])
    supers = planes.supers[expert] if f.has_super else None
    scales, mins = _scales(f, planes.scales[expert], supers)
    values = scales * (codes - f.offset)
    if mins is not None:
        values = values - mins
    return values.flatten(1)[:, : planes.cols]


def _codes(f: Format, planes: Tensor) -> Tensor:
    """uint8 [rows, parts, units, 16] to float32 [rows, units, groups, columns of a group]."""
    low, high = planes.split([f.low_parts, f.high_parts], dim=1)
    codes = _split(low, f.low_bits)
    if f.high_bits:
        codes = codes | _split(high, f.high_bits) << f.low_bits
    values = codes.permute(0, 2, 1, 3)  # [rows, units, 8, 16]
    if f.table != Table.NONE:
        levels = torch.tensor(LEVELS[f.table], dtype=torch.float32, device=planes.device)
        numbers = levels[values.long()]
    elif f.low_bits == 8:
        numbers = values.contiguous().view(torch.int8).float()
    else:
        numbers = values.float()
    return numbers.reshape(len(planes), -1, UNIT // f.group, f.group)


def _split(parts: Tensor, bits: int) -> Tensor:
    """[rows, bits, units, 16] bytes to [rows, 8, units, 16] values of `bits` bits."""
    if bits == 8:
        return parts
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=parts.device)[:, None, None]
    values = (parts[:, :, None] >> shifts) & ((1 << bits) - 1)
    return values.reshape(len(parts), 8, -1, FIELD)


def _scales(f: Format, words: Tensor, supers: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """int32 [rows, units, words] to float32 scales and mins [rows, units, groups, 1]."""
    units = words.shape[1]
    octets = words.contiguous().view(torch.uint8)  # [rows, units, bytes]
    if f.scale == Scale.E8M0:
        return torch.ldexp(torch.ones_like(octets, dtype=torch.float32), octets.int() - 128)[..., None], None
    if f.scale == Scale.F16:
        return octets.view(torch.float16).float()[..., None], None
    if f.scale == Scale.F16_MIN:
        pairs = octets.view(torch.float16).float().unflatten(2, (-1, 2))
        return pairs[..., :1], -pairs[..., 1:]
    assert supers is not None
    halves = supers[..., None].view(torch.float16).float().repeat_interleave(2, dim=1)[:, :units]
    d, dmin = halves[..., :1], halves[..., 1:]  # [rows, units, 1]
    if f.scale == Scale.I8:
        return (d * octets.view(torch.int8).float())[..., None], None
    if f.scale == Scale.NIBBLE_MIN:
        return (d * (octets & 15).float())[..., None], (dmin * (octets >> 4).float())[..., None]
    scales, mins = octets.float().chunk(2, dim=2)
    return (d * scales)[..., None], (dmin * mins)[..., None]
