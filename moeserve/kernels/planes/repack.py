"""GGUF rows to planes: a few vectorised torch operations a tensor, on whichever device the bytes are.

Loading copies a tensor's raw bytes to the GPU and repacks there, a slice of rows at a time: every slice passes through
one byte a weight, so a slice is kept small beside the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.kernels.planes.formats import (
    FIELD,
    FLOATS,
    FORMATS,
    UNIT,
    Format,
    GgmlType,
    Planes,
    Scale,
    supers_of,
    units_of,
)

SLICE_WEIGHTS = 1 << 26  # unpacked at a time


@dataclass(frozen=True, slots=True)
class Unpacked:
    """Blocks taken apart. Leading dimensions [n, blocks]."""

    codes: Tensor  # uint8 [.., block]; of a header alone, none
    scales: Tensor  # uint8 [.., bytes]: what `Scale` says, the groups of a block in order
    mins: Tensor | None = None  # uint8 [.., groups], of Scale.U8_MIN
    supers: Tensor | None = None  # uint8 [.., 4]: d, dmin or zeros


def repack(rows: Tensor, kind: GgmlType, shape: tuple[int, ...]) -> Planes:
    """uint8 GGUF bytes of a tensor [rows, cols] or [experts, rows, cols] (row-major; any shape of bytes) to planes on
    the same device. The bytes of a float type are copied as they are. ValueError where bytes and shape differ."""
    planes = empty_planes(kind, shape, rows.device)
    repack_into(planes, rows, 0)
    return planes


def empty_planes(kind: GgmlType, shape: tuple[int, ...], device: torch.device | str) -> Planes:
    """Planes of a tensor [rows, cols] or [experts, rows, cols] without its numbers: `repack_into` fills them."""
    experts, rows, cols = (1, *shape) if len(shape) == 2 else shape
    none = torch.empty(0, dtype=torch.int32, device=device)
    if kind in FLOATS:
        floats = torch.empty(experts, rows, cols, dtype=FLOATS[kind], device=device)
        return Planes(kind, experts, rows, cols, floats, none, none)
    f, units = FORMATS[kind], units_of(cols)
    codes = torch.empty(
        experts, rows, f.low_parts + f.high_parts, units, FIELD, dtype=torch.uint8, device=device
    )
    scales = torch.empty(experts, rows, units, f.words, dtype=torch.int32, device=device)
    supers = (
        torch.empty(experts, rows, supers_of(cols), dtype=torch.int32, device=device) if f.has_super else none
    )
    return Planes(kind, experts, rows, cols, codes, scales, supers)


def repack_into(planes: Planes, source: Tensor, row: int) -> None:
    """Fills rows `row` on (of the stack as one, experts * rows) from uint8 GGUF bytes on the planes' device."""
    if not planes.quantised:
        whole = planes.codes.view(-1, planes.cols)
        given = source.reshape(-1).view(whole.dtype).view(-1, planes.cols)
        whole[row : row + len(given)] = given
        return
    f = FORMATS[planes.type]
    row_bytes = planes.cols // f.block * f.block_bytes
    given = source.reshape(-1, row_bytes)
    total = planes.experts * planes.rows
    if planes.cols % f.block or row + len(given) > total:
        raise ValueError(
            f"{len(given)} rows of {planes.cols} columns at row {row} of {total}: not of this matrix"
        )
    step = max(1, SLICE_WEIGHTS // planes.cols)
    for start in range(0, len(given), step):
        part = given[start : start + step]
        unpacked = _UNPACK[planes.type](part.view(len(part), -1, f.block_bytes))
        at = slice(row + start, row + start + len(part))
        planes.codes.view(total, -1, planes.codes.shape[3], FIELD)[at] = _pack_codes(f, unpacked.codes)
        planes.scales.view(total, -1, f.words)[at] = pack_scales(f, unpacked)
        if unpacked.supers is not None:
            planes.supers.view(total, -1)[at] = (
                unpacked.supers.flatten().contiguous().view(torch.int32).view(len(part), -1)
            )


def _pack_codes(f: Format, codes: Tensor) -> Tensor:
    """uint8 [n, blocks, block] to [n, parts, units, 16]."""
    n = len(codes)
    fields = _to_units(codes.reshape(n, -1), UNIT).view(n, -1, UNIT // FIELD, FIELD).transpose(1, 2)
    parts = [_merge(fields & ((1 << f.low_bits) - 1), f.low_bits)]  # fields: [n, 8, units, 16]
    if f.high_bits:
        parts.append(_merge(fields >> f.low_bits, f.high_bits))
    return torch.cat(parts, dim=1)


def _merge(fields: Tensor, bits: int) -> Tensor:
    """[n, 8, units, 16] of `bits`-bit values to [n, bits, units, 16] bytes of consecutive fields."""
    n, _, units, _ = fields.shape
    grouped = fields.reshape(n, bits, 8 // bits, units, FIELD)
    out = grouped[:, :, 0].clone()
    for i in range(1, 8 // bits):
        out |= grouped[:, :, i] << (bits * i)
    return out


def pack_scales(f: Format, u: Unpacked) -> Tensor:
    """To int32 [n, units, words]."""
    n, groups = len(u.scales), UNIT // f.group
    per_group = {Scale.F16: 2, Scale.F16_MIN: 4}.get(f.scale, 1)  # bytes
    scales = _to_units(u.scales.reshape(n, -1), groups * per_group).view(n, -1, groups * per_group)
    if u.mins is not None:
        mins = _to_units(u.mins.reshape(n, -1), groups).view(n, -1, groups)
        scales = torch.cat([scales, mins], dim=2)
    return scales.flatten().contiguous().view(torch.int32).view(n, -1, f.words)


def _to_units(values: Tensor, width: int) -> Tensor:
    """[n, any] padded with zeros to a multiple of `width`."""
    missing = -values.shape[1] % width
    return torch.nn.functional.pad(values, (0, missing)) if missing else values


# ---------------------------------------------------------------- one function per type
# b: uint8 [n, blocks, block bytes], the layouts of ggml's blocks.


def _nibbles(qs: Tensor) -> Tensor:
    """Low nibbles of all bytes of the last dimension, then their high nibbles."""
    return torch.cat([qs & 15, qs >> 4], dim=-1)


def _spread(qs: Tensor, width: int, bits: int) -> Tensor:
    """Bytes in runs of `width`: all first `bits`-bit fields of a run, then all second ones, ..."""
    runs: Tensor = qs.unflatten(-1, (-1, 1, width))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=qs.device)[:, None]
    return ((runs >> shifts) & ((1 << bits) - 1)).flatten(-3)


def _bits32(qh: Tensor) -> Tensor:
    """The bits of 4 bytes, from the lowest: [.., 4] to [.., 32]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=qh.device)
    return ((qh[..., None] >> shifts) & 1).flatten(-2)


def _q4_0(b: Tensor) -> Unpacked:
    return Unpacked(_nibbles(b[..., 2:]), b[..., :2])


def _q4_1(b: Tensor) -> Unpacked:
    return Unpacked(_nibbles(b[..., 4:]), b[..., :4])


def _q5_0(b: Tensor) -> Unpacked:
    return Unpacked(_nibbles(b[..., 6:]) | _bits32(b[..., 2:6]) << 4, b[..., :2])


def _q5_1(b: Tensor) -> Unpacked:
    return Unpacked(_nibbles(b[..., 8:]) | _bits32(b[..., 4:8]) << 4, b[..., :4])


def _q8_0(b: Tensor) -> Unpacked:
    return Unpacked(b[..., 2:], b[..., :2])


def _mxfp4(b: Tensor) -> Unpacked:
    return Unpacked(_nibbles(b[..., 1:]), b[..., :1])


def _q2_k(b: Tensor) -> Unpacked:
    return Unpacked(_spread(b[..., 16:80], 32, 2), b[..., :16], supers=b[..., 80:84])


def _q3_k(b: Tensor) -> Unpacked:
    codes = _spread(b[..., 32:96], 32, 2) | _spread(b[..., :32], 32, 1) << 2
    return Unpacked(codes, _q3_k_scales(b[..., 96:108]), supers=_with_zeros(b[..., 108:110]))


def _k_scales(b: Tensor) -> tuple[Tensor, Tensor]:
    """The 8 six-bit scales and mins in bytes 4 .. 15 of a Q4_K or Q5_K block."""
    first, second, third = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scales = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], dim=-1)
    mins = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], dim=-1)
    return scales, mins


def _q4_k(b: Tensor) -> Unpacked:
    return Unpacked(_spread(b[..., 16:], 32, 4), *_k_scales(b), supers=b[..., :4])


def _q5_k(b: Tensor) -> Unpacked:
    codes = _spread(b[..., 48:], 32, 4) | _spread(b[..., 16:48], 32, 1) << 4
    return Unpacked(codes, *_k_scales(b), supers=b[..., :4])


def _q6_k(b: Tensor) -> Unpacked:
    codes = _spread(b[..., :128], 64, 4) | _spread(b[..., 128:192], 32, 2) << 4
    return Unpacked(codes, b[..., 192:208], supers=_with_zeros(b[..., 208:210]))


def _iq4_xs(b: Tensor) -> Unpacked:
    return Unpacked(_spread(b[..., 8:], 16, 4), _iq4_xs_scales(b), supers=_with_zeros(b[..., :2]))


def scales_of_header(kind: GgmlType, b: Tensor) -> Unpacked:
    """Of blocks without their codes, uint8 [n, blocks, bytes]: d, dmin where there is one, then the scales' bytes in
    the block's order."""
    none = b[..., :0]
    if kind in (GgmlType.Q4_K, GgmlType.Q5_K):
        return Unpacked(none, *_k_scales(b), supers=b[..., :4])
    if kind == GgmlType.Q2_K:
        return Unpacked(none, b[..., 4:], supers=b[..., :4])
    if kind == GgmlType.Q3_K:
        return Unpacked(none, _q3_k_scales(b[..., 2:]), supers=_with_zeros(b[..., :2]))
    if kind == GgmlType.Q6_K:
        return Unpacked(none, b[..., 2:], supers=_with_zeros(b[..., :2]))
    if kind == GgmlType.IQ4_XS:
        return Unpacked(none, _iq4_xs_scales(b), supers=_with_zeros(b[..., :2]))
    return Unpacked(none, b)


def _q3_k_scales(b: Tensor) -> Tensor:
    return _signed(_nibbles(b[..., :8]) | _spread(b[..., 8:12], 4, 2) << 4)


def _iq4_xs_scales(b: Tensor) -> Tensor:
    low = torch.stack([b[..., 4:8] & 15, b[..., 4:8] >> 4], dim=-1).flatten(-2)
    high = torch.stack([(b[..., 2:4] >> s) & 3 for s in (0, 2, 4, 6)], dim=-1).flatten(-2)
    return _signed(low | high << 4)


def _signed(six: Tensor) -> Tensor:
    """Six-bit scales with an offset of 32, as bytes of int8."""
    return (six.view(torch.int8) - 32).view(torch.uint8)


def _with_zeros(d: Tensor) -> Tensor:
    return torch.cat([d, torch.zeros_like(d)], dim=-1)


_UNPACK: dict[GgmlType, Callable[[Tensor], Unpacked]] = {
    GgmlType.Q4_0: _q4_0,
    GgmlType.Q4_1: _q4_1,
    GgmlType.Q5_0: _q5_0,
    GgmlType.Q5_1: _q5_1,
    GgmlType.Q8_0: _q8_0,
    GgmlType.Q2_K: _q2_k,
    GgmlType.Q3_K: _q3_k,
    GgmlType.Q4_K: _q4_k,
    GgmlType.Q5_K: _q5_k,
    GgmlType.Q6_K: _q6_k,
    GgmlType.IQ4_NL: _q4_0,
    GgmlType.IQ4_XS: _iq4_xs,
    GgmlType.MXFP4: _mxfp4,
}
