"""Dequantises rows of GGUF blocks in numpy, bit for bit like ggml."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moeserve.quantization.codebook import BookScales, Codebook, Signs, entries_of
from moeserve.quantization.quant_type import (
    FLOAT32_BYTES,
    BitField,
    BlockLayout,
    QuantType,
    StoredScales,
    Trits,
)

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = npt.NDArray[np.float32]


def dequantize(kind: QuantType, data: Bytes) -> Floats:
    """Converts the uint8 bytes of whole blocks, of any shape, to float32 [values]."""
    flat = np.ascontiguousarray(data).reshape(-1)
    if kind.codebook is not None:
        return _from_book(kind, kind.codebook, flat.reshape(-1, kind.block_bytes))
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
    """Returns the codes' values, the offset not yet subtracted: [blocks, columns]."""
    low = layout.low
    codes = _trits(low, b) if isinstance(low, Trits) else _field(low, b, columns)
    if layout.high is not None:
        codes = codes | _field(layout.high, b, columns) << np.uint8(layout.low_bits)
    if layout.e4m3:
        return e4m3_values(codes)
    if layout.table is not None:
        return np.array(layout.table.levels, np.float32)[codes]
    return (codes.view(np.int8) if layout.low_bits == 8 else codes).astype(np.float32)


def e4m3_values(codes: Bytes) -> Floats:
    """Returns the floats of bytes with a sign, 4 bits of exponent and 3 of mantissa (https://arxiv.org/abs/2209.05433).
    A float16 of these bits has 8 less in its exponent. 127, which is not a number, becomes 480 here."""
    wide = codes.astype(np.uint16)
    halves = (wide & 128) << 8 | (wide & 127) << 7
    return halves.view(np.float16).astype(np.float32) * np.float32(256)


def _field(field: BitField, b: Bytes, columns: int) -> Bytes:
    runs = b[:, field.at : field.at + field.nbytes(columns)].reshape(len(b), -1, 1, field.width)
    shifts = np.arange(0, 8, field.bits, dtype=np.uint8)[:, None]
    codes = (runs >> shifts) & np.uint8((1 << field.bits) - 1)
    return codes.reshape(len(b), -1).view(np.uint8)


def _trits(trits: Trits, b: Bytes) -> Bytes:
    codes = []
    for run in trits.runs:
        octets = b[:, None, run.at : run.at + run.width].astype(np.uint32)
        digits = octets * 3 ** np.arange(run.digits, dtype=np.uint32)[:, None] % 256 * 3 // 256
        codes.append(digits.reshape(len(b), -1).astype(np.uint8))
    return np.concatenate(codes, axis=1)


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
    if stored == StoredScales.UE4M3:
        return _half_ue4m3(octets), None
    if stored == StoredScales.F32:
        return np.ascontiguousarray(octets).view(np.float32), None
    if stored == StoredScales.UE4M3_F32:
        own = np.ascontiguousarray(octets[:, :FLOAT32_BYTES]).view(np.float32)
        return _half_ue4m3(octets[:, FLOAT32_BYTES:]) * own, None
    if stored == StoredScales.E8M0:
        return np.ldexp(np.float32(1), octets.astype(np.int32) - 128).astype(np.float32), None
    if layout.has_zero:
        if stored == StoredScales.BF16_ZERO:
            bits = np.ascontiguousarray(b[:, layout.halves_at : end]).view(np.uint16)
            halves = (bits.astype(np.uint32) << 16).view(np.float32)
        zeros = octets.astype(np.float32) - np.float32(128 if layout.low_bits == 8 else 0)
        return halves, halves * zeros
    d, dmin = halves[:, :1], halves[:, 1:]
    if stored == StoredScales.NIBBLE_MIN:
        return d * (octets & 15).astype(np.float32), dmin * (octets >> 4).astype(np.float32)
    if stored == StoredScales.SIX_BIT_MIN:
        first, second, third = octets[:, :4], octets[:, 4:8], octets[:, 8:]
        scales = np.hstack([first & 63, (third & 15) | first >> 6 << 4])
        mins = np.hstack([second & 63, third >> 4 | second >> 6 << 4])
        return d * scales.astype(np.float32), dmin * mins.astype(np.float32)
    return d * _signed_scales(stored, octets).astype(np.float32), None


def _half_ue4m3(octets: Bytes) -> Floats:
    exponent, mantissa = octets.astype(np.int32) >> 3 & 15, octets.astype(np.float32) % 8
    value = np.where(exponent == 0, np.ldexp(mantissa, -10), np.ldexp(8 + mantissa, exponent - 11))
    return np.where(octets == 127, 0, value).astype(np.float32)  # 127 is not a number: ggml reads 0


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


# ---------------------------------------------------------------- codebooks


def _from_book(kind: QuantType, book: Codebook, b: Bytes) -> Floats:
    numbers = entries_of(kind.name)[_indices(book, b)].astype(np.float32).reshape(len(b), 8, 4, 8)
    if book.has_delta:
        numbers = 8 * numbers + np.where(_minus_deltas(book, b), np.float32(-1), np.float32(1))
    else:
        numbers = np.where(_minus_signs(book, b), -numbers, numbers)
    scales = _d(book, b) * (2 * _book_scales(book, b) + 1).astype(np.float32) * np.float32(book.eighths / 8)
    values: Floats = (scales[..., None] * numbers.reshape(len(b), -1, book.group)).astype(np.float32)
    return values.reshape(-1)


def _indices(book: Codebook, b: Bytes) -> npt.NDArray[np.int64]:
    """[blocks, groups, entries of a group]."""
    each = 32 // book.columns
    low = book.low.of(b, each).astype(np.int64)
    entry = np.arange(each)
    if book.signs == Signs.HIGH_7:
        assert book.word is not None
        return low | (book.word.of(b, 4).astype(np.int64) & 1) << 8
    if book.high is None:
        return low
    high = book.high.of(b, book.high.group).astype(np.int64)
    if book.signs == Signs.DELTA_ENTRY:
        return low | (high[..., entry // 2] >> 4 * (entry % 2) & 7) << 8
    joined = high[..., :1] if high.shape[-1] == 1 else high[..., :1] | high[..., 1:] << 8
    return low | (joined >> book.high_bits * entry & (1 << book.high_bits) - 1) << 8


def _minus_signs(book: Codebook, b: Bytes) -> npt.NDArray[np.bool_]:
    """[blocks, groups, eights, 8 columns]."""
    assert book.word is not None
    word = book.word.of(b, 4).astype(np.uint32)
    signs: npt.NDArray[Any] = word
    if book.signs != Signs.BYTES:
        joined = (word << np.array([0, 8, 16, 24], np.uint32)).sum(-1, dtype=np.uint32)[..., None]
        sevens = (
            joined >> np.array([0, 7, 14, 21], np.uint32) & 127 if book.signs == Signs.PACKED_7 else word >> 1
        )
        odd = sum(sevens >> bit & 1 for bit in range(7)) & 1
        signs = sevens | odd << 7
    return (signs[..., None] >> np.arange(8, dtype=np.uint32) & 1).astype(np.bool_)


def _minus_deltas(book: Codebook, b: Bytes) -> npt.NDArray[np.bool_]:
    """[blocks, groups, entries, 1]."""
    assert book.high is not None
    high = book.high.of(b, 2)
    entry = np.arange(4)
    if book.signs == Signs.DELTA_GROUP:
        return np.broadcast_to(high[..., 1:, None] >= 128, (len(b), 8, 4, 1))
    minus: npt.NDArray[np.bool_] = (high[..., entry // 2] >> 4 * (entry % 2) & 8 != 0)[..., None]
    return minus


def _threes_words(book: Codebook, b: Bytes) -> npt.NDArray[np.uint16]:
    octets = np.ascontiguousarray(b[:, book.octets_at : book.octets_at + book.octets])
    return octets.view(np.uint16)


def _d(book: Codebook, b: Bytes) -> Floats:
    """[blocks, 1]."""
    if book.has_d:
        halves = np.ascontiguousarray(b[:, :2]).view(np.float16)
    else:
        nibbles = (_threes_words(book, b) >> 12) << np.array([0, 4, 8, 12], np.uint16)
        halves = nibbles.sum(-1, dtype=np.uint16, keepdims=True).view(np.float16)
    return halves.astype(np.float32)


def _book_scales(book: Codebook, b: Bytes) -> npt.NDArray[np.int64]:
    """The integers n: [blocks, 256 / group]."""
    if book.scales == BookScales.WORD_TOP:
        assert book.word is not None
        return book.word.of(b, 4)[..., 3].astype(np.int64) >> 4
    if book.scales == BookScales.HIGH_TOP_3:
        assert book.high is not None
        return book.high.of(b, 2)[..., 1].astype(np.int64) >> 4 & 7
    if book.scales == BookScales.THREES:
        threes = _threes_words(book, b)[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7
        return threes.reshape(len(b), -1).astype(np.int64)
    octets = b[:, book.octets_at : book.octets_at + book.octets].astype(np.int64)
    return np.stack([octets & 15, octets >> 4], axis=-1).reshape(len(b), -1)
