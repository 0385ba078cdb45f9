"""Planes of codebook types: how they are made from GGUF bytes, their specification in plain torch, and the
codebook.

    codes   uint8 [experts, rows, parts, k blocks, 16]: byte 4 j + g of a part belongs to columns 8 j .. 8 j + 7 of the
            k block's group g (of 32 columns). The parts: the low byte of their index (with entries of 4 columns, two
            parts for two indices); then, if entries have signs, their byte of the group's word. If that word packs
            four times seven signs and a scale, the byte is seven signs and bit j of the scale.
    scales  int32 [experts, rows, words per row]: for each k block the words of its high bytes, then its scale bytes;
            after all k blocks a word per super-block, with d. IQ3_S has two scale bytes per k block, with d above
            them. IQ1_M's d is spread over its scales, as in the file.
    supers  int32 [entries * columns / 4]: the codebook, one tensor for all matrices of a type on a device. Four
            columns per word: magnitudes or, if a delta is added, 8 * entry + 127; signed bytes if signs are included.

A row is slightly longer than in the file: 4 bytes for each d instead of 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from moeserve.kernels.planes.layout import Planes
from moeserve.quantization.codebook import (
    GROUP,
    BookScales,
    ByteRun,
    Codebook,
    Signs,
    entries_of,
    ternary_entries,
)
from moeserve.quantization.quant_type import K_BLOCK, SUPER_BLOCK, QuantType

GROUPS = K_BLOCK // GROUP  # per k block
DELTA_ZERO = 127  # added to the codebook's numbers of types that add a delta


@dataclass(frozen=True, slots=True)
class BookBytes:
    """The bytes of codebook blocks, split by their role (see the module's docstring for codes and scales).
    low, word and high: uint8 [rows, blocks, 8 groups, bytes per group]; octets and d: uint8 [rows, blocks,
    bytes]."""

    low: Tensor
    word: Tensor | None
    high: Tensor | None
    octets: Tensor
    d: Tensor  # a float16's two bytes; none if d is spread over the scales


def codebook_on(kind: QuantType, device: torch.device) -> Tensor:
    """Returns int32 [entries * columns / 4] on the device, shared by all of the type's matrices there."""
    return _codebook_on(kind, torch.empty(0, device=device).device)  # resolves the current GPU's number


@cache
def _codebook_on(kind: QuantType, device: torch.device) -> Tensor:
    assert kind.plane_book is not None
    entries = ternary_entries() if kind.trit_book is not None else entries_of(kind.name)
    numbers = 8 * entries.astype(np.int32) + DELTA_ZERO if kind.plane_book.has_delta else entries
    words = np.ascontiguousarray(numbers.astype(np.uint8)).view(np.int32).reshape(-1)
    return torch.from_numpy(words.copy()).to(device)


def book_bytes(book: Codebook, blocks: Tensor) -> BookBytes:
    """Splits blocks: uint8 [rows, blocks, block bytes], in GGUF's form."""
    return BookBytes(
        _bytes(blocks, book.low, GROUP // book.columns),
        None if book.word is None else _bytes(blocks, book.word, 4),
        None if book.high is None else _bytes(blocks, book.high, book.high.group),
        blocks[..., book.octets_at : book.octets_at + book.octets],
        blocks[..., : 2 if book.has_d else 0],
    )


def _bytes(blocks: Tensor, run: ByteRun, count: int) -> Tensor:
    group, byte = torch.arange(SUPER_BLOCK // GROUP), torch.arange(count)
    at = run.at + run.group * group[:, None] + run.step * byte
    return blocks[..., at.to(blocks.device)]


def pack_codes(book: Codebook, given: BookBytes) -> Tensor:
    """Packs indices and signs into the planes' codes: uint8 [rows, parts, k blocks, 16]."""
    low = _by_k_block(given.low).unflatten(-1, (4, book.low_parts))  # [rows, k blocks, g, j, part]
    parts = [low.permute(0, 4, 1, 3, 2)]
    if given.word is not None:
        octets = _spread_word(given.word) if book.signs == Signs.PACKED_7 else given.word
        parts.append(_by_k_block(octets).transpose(2, 3)[:, None])
    return torch.cat(parts, dim=1).flatten(3)


def _by_k_block(groups: Tensor) -> Tensor:
    """Reshapes [rows, blocks, 8, n] to [rows, k blocks, 4, n]."""
    out: Tensor = groups.flatten(1, 2).unflatten(1, (-1, GROUPS))
    return out


def _spread_word(word: Tensor) -> Tensor:
    """Splits a word of four times seven bits and then four into four bytes of seven bits and one of the four."""
    place = torch.arange(4, device=word.device)
    whole = (word.long() << 8 * place).sum(-1, keepdim=True)
    return (whole >> 7 * place & 127 | (whole >> 28 + place & 1) << 7).to(torch.uint8)


def pack_words(book: Codebook, given: BookBytes) -> Tensor:
    """Returns a codebook matrix's index bytes packed into the words that the kernels load: int32 [rows, words per
    row]."""
    rows = len(given.low)
    of_k_blocks = []
    if given.high is not None:
        of_k_blocks.append(_by_k_block(given.high).flatten(2))
    if book.octets:
        octets = given.octets.unflatten(-1, (2, -1))  # by k block
        if not book.has_tail and book.has_d:
            octets = torch.cat([octets, given.d[:, :, None].expand(-1, -1, 2, -1)], dim=-1)
        of_k_blocks.append(octets.flatten(1, 2))
    out = [torch.cat(of_k_blocks, dim=2).flatten(1)] if of_k_blocks else []
    if book.has_tail:
        out.append(torch.nn.functional.pad(given.d, (0, 2)).flatten(1))
    return torch.cat(out, dim=1).flatten().contiguous().view(torch.int32).view(rows, -1)


def dequantize_book(planes: Planes, expert: int) -> Tensor:
    """Returns one expert as float32 [rows, cols]."""
    book = planes.type.plane_book
    assert book is not None
    parts = planes.codes[expert].int().unflatten(-1, (4, 4)).transpose(3, 4)  # [rows, part, k blocks, g, j]
    words = planes.scales[expert]
    rows, k_blocks = len(words), parts.shape[2]
    own = words[:, : k_blocks * book.words].reshape(rows, k_blocks, book.words).contiguous()
    octets = own.view(torch.uint8).int()  # [rows, k blocks, 4 * words]
    high = octets[..., : 4 * book.high_words].unflatten(-1, (4, -1)) if book.high_words else None
    signs = parts[:, -1]
    table = planes.supers.view(torch.uint8).view(book.entries, book.columns)
    index = _indices(book, parts, signs, high)
    bit = torch.arange(8, device=words.device)
    if book.signs == Signs.INCLUDED:
        index = index | (octets[..., 8:10, None] >> bit & 1).reshape(rows, k_blocks, 4, 4, 1) << 12
        table = table.view(torch.int8)
    numbers = table[index.long()].int().flatten(-2)  # [rows, k blocks, g, j, 8]
    if book.has_delta:
        assert high is not None
        numbers = numbers - DELTA_ZERO + 1 - 2 * _minus(book, high)[..., None]
    elif book.signs != Signs.INCLUDED:
        numbers = numbers * (1 - 2 * (_sign_bits(book, signs)[..., None] >> bit & 1))
    n, d = _scales(book, octets[..., 4 * book.high_words :], signs, high), _d(book, words, octets)
    scale = d[..., None, None] * (2 * n + 1).float() * (book.eighths / 8)  # [rows, k blocks, g, j or 1]
    return (scale[..., None] * numbers.float()).flatten(1)


def _joined(high: Tensor) -> Tensor:
    """Returns a group's high bytes as one number: [rows, k blocks, g, 1]."""
    joined = high[..., :1]
    for byte in range(1, high.shape[-1]):
        joined = joined | high[..., byte : byte + 1] << 8 * byte
    return joined


def _indices(book: Codebook, parts: Tensor, signs: Tensor, high: Tensor | None) -> Tensor:
    """Returns the indices [rows, k blocks, g, j, entries per eight columns]."""
    low = parts[:, : book.low_parts].permute(0, 2, 3, 4, 1)
    if book.signs == Signs.HIGH_7:
        return low | (signs[..., None] & 1) << 8
    if high is None:
        return low
    each = 4 if book.signs == Signs.DELTA_ENTRY else book.high_bits  # bits from one entry to the next
    entry = torch.arange(GROUP // book.columns, device=parts.device)
    bits = _joined(high) >> each * entry & (1 << book.high_bits) - 1
    index: Tensor = low | bits.unflatten(-1, (4, book.low_parts)) << 8
    return index


def _minus(book: Codebook, high: Tensor) -> Tensor:
    entry = torch.arange(4, device=high.device)
    bit = torch.full_like(entry, 15) if book.signs == Signs.DELTA_GROUP else 4 * entry + 3
    minus: Tensor = _joined(high) >> bit & 1
    return minus


def _sign_bits(book: Codebook, signs: Tensor) -> Tensor:
    if book.signs == Signs.BYTES:
        return signs
    seven = signs & 127 if book.signs == Signs.PACKED_7 else signs >> 1
    odd = seven ^ seven >> 4
    odd = odd ^ odd >> 2
    return seven | ((odd ^ odd >> 1) & 1) << 7


def _scales(book: Codebook, octets: Tensor, signs: Tensor, high: Tensor | None) -> Tensor:
    """Returns the scales' integers n: [rows, k blocks, g, j], or size 1 for all j."""
    j = torch.arange(4, device=signs.device)
    if book.scales == BookScales.NONE:
        return torch.zeros_like(signs[..., :1])
    if book.scales == BookScales.WORD_TOP:
        return ((signs >> 7 & 1) << j).sum(-1, keepdim=True)
    if book.scales == BookScales.HIGH_TOP_3:
        assert high is not None
        return _joined(high) >> 12 & 7
    if book.scales == BookScales.NIBBLES_16:
        return octets[..., None] >> 4 * (j // 2) & 15
    if book.scales == BookScales.NIBBLES_32:
        return torch.stack([octets[..., :2] & 15, octets[..., :2] >> 4], dim=-1).flatten(2)[..., None]
    threes = octets[..., ::2] | octets[..., 1::2] << 8  # [rows, k blocks, 2]
    group = torch.arange(GROUPS, device=signs.device)[:, None]
    return (
        threes[..., None, None].expand(-1, -1, -1, 2, 1).flatten(2, 3) >> 3 * (2 * (group % 2) + j // 2) & 7
    )


def _d(book: Codebook, words: Tensor, octets: Tensor) -> Tensor:
    """Returns d: [rows, k blocks]."""
    k_blocks = octets.shape[1]
    if book.has_tail:
        bits = words[:, k_blocks * book.words :] & 0xFFFF
    elif book.has_d:
        bits = octets[:, ::2, -2] | octets[:, ::2, -1] << 8
    else:
        nibbles = octets[..., 4 * book.high_words + 1 :: 2] >> 4  # [rows, k blocks, 2]
        place = torch.arange(4, device=words.device)
        bits = (nibbles.unflatten(1, (-1, 2)).flatten(2) << 4 * place).sum(-1)
    return bits.to(torch.int16).view(torch.float16).float().repeat_interleave(2, dim=1)
