"""Dequantises planes in plain torch on any device: the reference for all kernels that read them."""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.kernels.planes.books import dequantize_book
from moeserve.kernels.planes.layout import FIELD, K_BLOCK, Planes
from moeserve.quantization import BlockLayout, Scale


def dequantize(planes: Planes, expert: int | None = None) -> Tensor:
    """Returns one expert as float32 [rows, cols], or all, [experts, rows, cols]; bit for bit ggml's dequantisation."""
    if expert is None:
        return torch.stack([dequantize(planes, e) for e in range(planes.experts)])
    if planes.type.plane_book is not None:
        return dequantize_book(planes, expert)
    f = planes.type.layout
    if f is None:
        return planes.codes[expert].float()
    codes = _codes(f, planes.codes[expert])
    supers = planes.supers[expert] if f.has_super else None
    scales, mins = _scales(f, planes.scales[expert], supers)
    values = scales * (codes - f.offset)
    if mins is not None:
        values = values - mins
    return values.flatten(1)[:, : planes.cols]


def _codes(f: BlockLayout, planes: Tensor) -> Tensor:
    """Converts uint8 [rows, parts, k blocks, 16] to float32 [rows, k blocks, groups, columns per group]."""
    low, high = planes.split([f.low_parts, f.high_parts], dim=1)
    codes = _split(low, f.low_bits)
    if f.high_bits:
        codes = codes | _split(high, f.high_bits) << f.low_bits
    values = codes.permute(0, 2, 1, 3)  # [rows, k blocks, 8, 16]
    if f.table is not None:
        levels = torch.tensor(f.table.levels, dtype=torch.float32, device=planes.device)
        numbers = levels[values.long()]
    elif f.e4m3:
        wide = values.to(torch.int16)
        numbers = ((wide & 128) << 8 | (wide & 127) << 7).view(torch.float16).float() * 256
    elif f.low_bits == 8:
        numbers = values.contiguous().view(torch.int8).float()
    else:
        numbers = values.float()
    return numbers.reshape(len(planes), -1, K_BLOCK // f.scale_group, f.scale_group)


def _split(parts: Tensor, bits: int) -> Tensor:
    """Splits [rows, bits, k blocks, 16] bytes into [rows, 8, k blocks, 16] values of `bits` bits."""
    if bits == 8:
        return parts
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=parts.device)[:, None, None]
    values = (parts[:, :, None] >> shifts) & ((1 << bits) - 1)
    return values.reshape(len(parts), 8, -1, FIELD)


def _scales(f: BlockLayout, words: Tensor, supers: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Converts int32 [rows, k blocks, words] to float32 scales and mins [rows, k blocks, groups, 1]."""
    k_blocks = words.shape[1]
    octets = words.contiguous().view(torch.uint8)  # [rows, k blocks, bytes]
    if f.scale == Scale.E8M0:
        return torch.ldexp(torch.ones_like(octets, dtype=torch.float32), octets.int() - 128)[..., None], None
    if f.scale == Scale.UE4M3:
        return _half_ue4m3(octets)[..., None], None
    if f.scale == Scale.F32:
        return octets.view(torch.float32)[..., None], None
    if f.scale == Scale.F16:
        return octets.view(torch.float16).float()[..., None], None
    if f.scale == Scale.F16_MIN:
        pairs = octets.view(torch.float16).float().unflatten(2, (-1, 2))
        return pairs[..., :1], -pairs[..., 1:]
    if f.scale == Scale.ZERO:
        return _scales_and_zeros(f, octets)
    assert supers is not None
    if f.scale == Scale.UE4M3_SUPER:
        own = supers.view(torch.float32).repeat_interleave(2, dim=1)[:, :k_blocks, None]
        return (_half_ue4m3(octets) * own)[..., None], None
    if f.scale == Scale.D:
        return supers.contiguous().view(torch.float16).float()[:, :k_blocks, None, None], None
    halves = supers[..., None].view(torch.float16).float().repeat_interleave(2, dim=1)[:, :k_blocks]
    d, dmin = halves[..., :1], halves[..., 1:]  # [rows, k blocks, 1]
    if f.scale == Scale.I8:
        return (d * octets.view(torch.int8).float())[..., None], None
    if f.scale == Scale.NIBBLE_MIN:
        return (d * (octets & 15).float())[..., None], (dmin * (octets >> 4).float())[..., None]
    scales, mins = octets.float().chunk(2, dim=2)
    return (d * scales)[..., None], (dmin * mins)[..., None]


def _half_ue4m3(octets: Tensor) -> Tensor:
    """Returns half of the unsigned 8-bit floats, as float32. Read as float16, their bits have an exponent that is 8 too
    small."""
    halves = ((octets & 127).to(torch.int16) << 7).view(torch.float16)
    return torch.where(octets == 127, 0.0, halves.float() * 128)


def _scales_and_zeros(f: BlockLayout, octets: Tensor) -> tuple[Tensor, Tensor]:
    if f.wide:
        groups = octets.unflatten(2, (-1, 4))
        halves, zeros = groups[..., :2], groups[..., 2]
    else:
        halves, zeros = octets[..., :8].unflatten(2, (-1, 2)), octets[..., 8:]
    scales = halves.contiguous().view(torch.bfloat16 if f.has_bfloat16 else torch.float16).float()
    return scales, scales * (zeros.float() - (128 if f.low_bits == 8 else 0))[..., None]
