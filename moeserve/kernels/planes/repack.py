"""Converts GGUF rows to planes by a few vectorised torch operations per tensor, on the bytes' device.

Loading copies a tensor's raw bytes to the GPU and repacks them there, a slice of rows at a time: a slice expands to
one byte per weight, so it is kept small compared with the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.kernels.planes.books import book_bytes, codebook_on, pack_codes, pack_words
from moeserve.kernels.planes.layout import (
    FIELD,
    K_BLOCK,
    Planes,
    float_dtype,
    k_blocks_of,
    layout_of,
    supers_of,
)
from moeserve.kernels.planes.trits import trit_bytes
from moeserve.quantization import BitField, BlockLayout, QuantType, Scale, StoredScales
from moeserve.quantization.codebook import Codebook
from moeserve.quantization.quant_type import FLOAT32_BYTES, SUPER_BLOCK

SLICE_WEIGHTS = 1 << 26  # weights unpacked at a time


@dataclass(frozen=True, slots=True)
class Unpacked:
    """Blocks split by kind. Leading dimensions [n, blocks]."""

    codes: Tensor  # uint8 [.., block]; empty if only a header is unpacked
    scales: Tensor  # uint8 [.., bytes]: in `Scale`'s form, a block's groups in order
    mins: Tensor | None = None  # uint8 [.., groups], for Scale.U8_MIN
    supers: Tensor | None = None  # uint8 [.., 4]: d, then dmin or zeros


def repack(rows: Tensor, kind: QuantType, shape: tuple[int, ...]) -> Planes:
    """Returns the planes, on the same device, of a tensor's uint8 GGUF bytes: [rows, cols] or [experts, rows, cols]
    (row-major; any shape of bytes). A float type's bytes are copied unchanged. Raises ValueError if bytes and shape do
    not match."""
    planes = empty_planes(kind, shape, rows.device)
    repack_into(planes, rows, 0)
    return planes


def empty_planes(kind: QuantType, shape: tuple[int, ...], device: torch.device | str) -> Planes:
    """Returns uninitialised planes of a tensor [rows, cols] or [experts, rows, cols]; `repack_into` fills them."""
    experts, rows, cols = (1, *shape) if len(shape) == 2 else shape
    none = torch.empty(0, dtype=torch.int32, device=device)
    f = kind.planes_form
    if f is None:
        floats = torch.empty(experts, rows, cols, dtype=float_dtype(kind), device=device)
        return Planes(kind, experts, rows, cols, floats, none, none)
    k_blocks = k_blocks_of(cols)
    codes = torch.empty(experts, rows, f.parts, k_blocks, FIELD, dtype=torch.uint8, device=device)
    if isinstance(f, Codebook):
        words = torch.empty(experts, rows, f.row_words(k_blocks), dtype=torch.int32, device=device)
        return Planes(kind, experts, rows, cols, codes, words, codebook_on(kind, torch.device(device)))
    scales = torch.empty(experts, rows, k_blocks, f.words, dtype=torch.int32, device=device)
    supers = (
        torch.empty(experts, rows, supers_of(cols), dtype=torch.int32, device=device) if f.has_super else none
    )
    return Planes(kind, experts, rows, cols, codes, scales, supers)


def repack_into(planes: Planes, source: Tensor, row: int) -> None:
    """Fills rows from `row` on (counted over the whole stack, experts * rows) from uint8 GGUF bytes on the planes'
    device."""
    kind = planes.type
    if not kind.is_quantised:
        whole = planes.codes.view(-1, planes.cols)
        given = source.reshape(-1).view(whole.dtype).view(-1, planes.cols)
        whole[row : row + len(given)] = given
        return
    given = source.reshape(-1, kind.row_bytes(planes.cols))
    total = planes.experts * planes.rows
    if planes.cols % kind.block_columns or row + len(given) > total:
        raise ValueError(
            f"{len(given)} rows of {planes.cols} columns from row {row} on: not of this matrix, which has {total} rows "
            f"and blocks of {kind.block_columns} columns"
        )
    step = max(1, SLICE_WEIGHTS // planes.cols)
    for start in range(0, len(given), step):
        part = given[start : start + step]
        at = slice(row + start, row + start + len(part))
        _fill(planes, part.view(len(part), -1, kind.block_bytes), at)


def _fill(planes: Planes, blocks: Tensor, at: slice) -> None:
    """Fills rows from `at` on from uint8 [rows, blocks, block bytes]."""
    total = planes.experts * planes.rows
    codes = planes.codes.view(total, -1, planes.codes.shape[3], FIELD)
    if (book := planes.type.plane_book) is not None:
        given = book_bytes(book, blocks) if planes.type.trit_book is None else trit_bytes(planes.type, blocks)
        codes[at] = pack_codes(book, given)
        planes.scales.view(total, -1)[at] = pack_words(book, given)
        return
    f, unpacked = layout_of(planes.type), _unpack(planes.type, blocks)
    codes[at] = _pack_codes(f, unpacked.codes)
    if f.words:
        planes.scales.view(total, -1, f.words)[at] = pack_scales(f, unpacked)
    if unpacked.supers is not None:
        words = unpacked.supers.flatten().contiguous().view(torch.int32)
        planes.supers.view(total, -1)[at] = words.view(len(blocks), -1)


def _pack_codes(f: BlockLayout, codes: Tensor) -> Tensor:
    """Converts uint8 [n, blocks, block] to [n, parts, k blocks, 16]."""
    n = len(codes)
    fields = _to_k_blocks(codes.reshape(n, -1), K_BLOCK).view(n, -1, K_BLOCK // FIELD, FIELD).transpose(1, 2)
    parts = [_merge(fields & ((1 << f.low_bits) - 1), f.low_bits)]  # fields: [n, 8, k blocks, 16]
    if f.high_bits:
        parts.append(_merge(fields >> f.low_bits, f.high_bits))
    return torch.cat(parts, dim=1)


def _merge(fields: Tensor, bits: int) -> Tensor:
    """Merges [n, 8, k blocks, 16] values of `bits` bits into [n, bits, k blocks, 16] bytes of consecutive fields."""
    n, _, k_blocks, _ = fields.shape
    grouped = fields.reshape(n, bits, 8 // bits, k_blocks, FIELD)
    out = grouped[:, :, 0].clone()
    for i in range(1, 8 // bits):
        out |= grouped[:, :, i] << (bits * i)
    return out


def pack_scales(f: BlockLayout, u: Unpacked) -> Tensor:
    """Packs scales into the planes' words: int32 [n, k blocks, words]."""
    n, groups = len(u.scales), K_BLOCK // f.scale_group
    if f.scale == Scale.ZERO:
        return _pack_zeros(f, u)
    per_group = {Scale.F16: 2, Scale.F16_MIN: 4, Scale.F32: 4}.get(f.scale, 1)  # bytes
    scales = _to_k_blocks(u.scales.reshape(n, -1), groups * per_group).view(n, -1, groups * per_group)
    if u.mins is not None:
        mins = _to_k_blocks(u.mins.reshape(n, -1), groups).view(n, -1, groups)
        scales = torch.cat([scales, mins], dim=2)
    return scales.flatten().contiguous().view(torch.int32).view(n, -1, f.words)


def _pack_zeros(f: BlockLayout, u: Unpacked) -> Tensor:
    n, groups = len(u.scales), K_BLOCK // f.scale_group
    assert u.mins is not None
    halves = _to_k_blocks(u.scales.reshape(n, -1), 2 * groups).view(n, -1, groups, 2)
    zeros = _to_k_blocks(u.mins.reshape(n, -1), groups).view(n, -1, groups, 1)
    if f.wide:
        octets = torch.cat([halves, torch.nn.functional.pad(zeros, (0, 1))], dim=3).flatten(2)
    else:
        octets = torch.cat([halves.flatten(2), zeros.flatten(2)], dim=2)
    return octets.flatten().contiguous().view(torch.int32).view(n, -1, f.words)


def _to_k_blocks(values: Tensor, width: int) -> Tensor:
    """Pads [n, any] with zeros to a multiple of `width`."""
    missing = -values.shape[1] % width
    return torch.nn.functional.pad(values, (0, missing)) if missing else values


# ---------------------------------------------------------------- from GGUF's blocks


def _unpack(kind: QuantType, b: Tensor) -> Unpacked:
    """Splits GGUF blocks by kind. b: uint8 [n, blocks, block bytes]."""
    f = layout_of(kind)
    assert isinstance(f.low, BitField), "a type that GPUs read"
    codes = _spread(f.low, b, kind.block_columns)
    if f.high is not None:
        codes = codes | _spread(f.high, b, kind.block_columns) << f.low_bits
    halves = b[..., f.halves_at : f.halves_at + 2 * f.halves]
    return unpack_scales(f, halves, b[..., f.octets_at : f.octets_at + f.octets], codes)


def _spread(field: BitField, b: Tensor, columns: int) -> Tensor:
    """Returns the field's bits of each column: uint8 [n, blocks, columns]."""
    return _split_bytes(b[..., field.at : field.at + field.nbytes(columns)], field.width, field.bits)


def _split_bytes(octets: Tensor, width: int, bits: int) -> Tensor:
    """Splits bytes in runs of `width`: the first `bits` bits of all bytes of a run, then their second `bits` bits,
    and so on."""
    runs: Tensor = octets.unflatten(-1, (-1, 1, width))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=octets.device)[:, None]
    return ((runs >> shifts) & ((1 << bits) - 1)).flatten(-3)


def unpack_scales(f: BlockLayout, halves: Tensor, octets: Tensor, codes: Tensor) -> Unpacked:
    """Returns the blocks' codes with their scales unpacked to a byte each. halves: the bytes of a block's float16
    numbers; octets: its scale bytes, as stored; codes: its codes. uint8 [n, blocks, bytes]."""
    stored = f.stored_scales
    if f.has_zero:
        return Unpacked(codes, halves, octets)
    if f.scale == Scale.D:
        each = halves if f.wide == K_BLOCK else torch.cat([halves, halves], dim=-1)
        return Unpacked(codes, each[..., :0], supers=_to_k_blocks(each.flatten(1), 4))
    if f.scale == Scale.UE4M3_SUPER:  # all blocks of a super-block repeat these bytes: take the first block's
        every = SUPER_BLOCK // (f.group * (f.octets - FLOAT32_BYTES))
        return Unpacked(
            codes, octets[..., FLOAT32_BYTES:], supers=octets[:, ::every, :FLOAT32_BYTES].flatten(1)
        )
    if not f.has_super:
        return Unpacked(codes, octets if f.octets else halves)
    supers = halves if f.halves == 2 else torch.cat([halves, torch.zeros_like(halves)], dim=-1)
    if stored == StoredScales.SIX_BIT_MIN:
        first, second, third = octets[..., :4], octets[..., 4:8], octets[..., 8:]
        scales = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], dim=-1)
        mins = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], dim=-1)
        return Unpacked(codes, scales, mins, supers)
    if stored == StoredScales.SIX_BIT_Q3_K:
        low, high = _split_bytes(octets[..., :8], 8, 4), _split_bytes(octets[..., 8:], 4, 2)
        return Unpacked(codes, _signed(low | high << 4), supers=supers)
    if stored == StoredScales.SIX_BIT_IQ4_XS:
        low, high = _split_bytes(octets[..., 2:], 1, 4), _split_bytes(octets[..., :2], 1, 2)
        return Unpacked(codes, _signed(low | high << 4), supers=supers)
    return Unpacked(codes, octets, supers=supers)


def _signed(six: Tensor) -> Tensor:
    """Returns six-bit scales with an offset of 32 as int8 bytes."""
    return (six.view(torch.int8) - 32).view(torch.uint8)
