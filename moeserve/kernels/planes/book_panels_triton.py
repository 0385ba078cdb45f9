"""Converts panels of codebook types to planes on a GPU, as `from_panels.py` specifies. Bytes only move."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moeserve.kernels.launch import kernel, next_power_of_2
from moeserve.kernels.planes.layout import k_blocks_of
from moeserve.quantization.codebook import BookScales, Codebook, Signs

PANEL_ROWS = 32
_ROWS = tl.constexpr(PANEL_ROWS)
_PACKED_7 = tl.constexpr(int(Signs.PACKED_7))
_INCLUDED = tl.constexpr(int(Signs.INCLUDED))
_NIBBLES_32 = tl.constexpr(int(BookScales.NIBBLES_32))


@triton.constexpr_function
def header_bytes(F):
    return 32 * (2 * int(F.has_d) + F.octets)


@triton.constexpr_function
def half_bytes(F):
    """Returns the bytes of 16 rows' group."""
    return 16 * (32 // F.columns + (0 if F.word is None else 4) + F.high_words)


@triton.constexpr_function
def block_bytes(F):
    return header_bytes(F) + 16 * half_bytes(F)


@triton.jit
def move_book_codes(panels, codes, part, K_BLOCKS: tl.constexpr, F: tl.constexpr, X: tl.constexpr):
    """Moves one part of a panel's 32 rows. panels: bytes; codes: int32 words of four groups' bytes. X: a power of
    two of at least 4 K_BLOCKS, the words of a row's part."""
    row, x = tl.arange(0, _ROWS)[None, :], tl.arange(0, X)[:, None]
    k_block, j = x // 4, x % 4
    live = k_block < K_BLOCKS
    half = panels + (tl.program_id(0).to(tl.int64) * (K_BLOCKS // 2)) * block_bytes(F) + header_bytes(F)
    half += row // 16 * half_bytes(F)
    LOW: tl.constexpr = 32 // F.columns
    out = tl.zeros([X, _ROWS], tl.int32)
    for g in tl.static_range(4):
        at = half + k_block // 2 * block_bytes(F) + (k_block % 2 * 4 + g) * (2 * half_bytes(F))
        if part < F.low_parts:
            octet = tl.load(at + (j * F.low_parts + part) * 16 + row % 16, live, 0).to(tl.int32)
        else:
            word = at + LOW * 16 + row % 16 * 4
            octet = tl.load(word + j, live, 0).to(tl.int32)
            if F.signs == _PACKED_7:
                # Seven bits from bit 7 j on; they are in byte j and, except for the first, in the byte before.
                before = tl.load(word + j - 1, live & (j > 0), 0).to(tl.int32)
                top = (tl.load(word + 3, live, 0).to(tl.int32) >> (4 + j)) & 1
                octet = (((octet << j) | (before >> (8 - j))) & 127) | (top << 7)
        out |= octet << (8 * g)
    to = (tl.program_id(0).to(tl.int64) * _ROWS + row) * F.parts + part
    tl.store(codes + to * (4 * K_BLOCKS) + x, out, x < 4 * K_BLOCKS)


@triton.jit
def move_book_words(panels, scales, K_BLOCKS: tl.constexpr, F: tl.constexpr, Y: tl.constexpr):
    """Moves the scale words of a panel's 32 rows from `panels` to `scales`, byte by byte (uint8). Y: a power of two of
    at least the bytes that a row's scale words take."""
    row, y = tl.arange(0, _ROWS)[None, :], tl.arange(0, Y)[:, None]
    block = panels + (tl.program_id(0).to(tl.int64) * (K_BLOCKS // 2)) * block_bytes(F)
    EACH: tl.constexpr = 4 * F.words
    OWN: tl.constexpr = K_BLOCKS * EACH
    BYTES: tl.constexpr = OWN + (2 * K_BLOCKS if F.has_tail else 0)
    out = tl.zeros([Y, _ROWS], tl.uint8)
    if EACH > 0:
        k_block, byte = y // EACH, y % EACH
        mine = block + k_block // 2 * block_bytes(F)
        if F.high_words > 0:
            g, b = k_block % 2 * 4 + byte // F.high_words, byte % F.high_words
            half = mine + header_bytes(F) + g * (2 * half_bytes(F)) + row // 16 * half_bytes(F)
            at = half + half_bytes(F) - 16 * F.high_words + 16 * b + row % 16
            out = tl.load(at, (y < OWN) & (byte < 4 * F.high_words), 0)
        if F.octets > 0:
            place = byte - 4 * F.high_words
            is_octet = (y < OWN) & (place >= 0) & (place < F.octets // 2)
            at = mine + 64 * F.has_d + (k_block % 2 * (F.octets // 2) + place) * _ROWS + row
            out |= tl.load(at, is_octet, 0)
        if F.scales == _NIBBLES_32:
            out |= tl.load(mine + 2 * row + place - 2, (y < OWN) & (place >= 2), 0)
    if F.has_tail:
        place = y - OWN
        at = block + place // 4 * block_bytes(F) + 2 * row + place % 4
        out |= tl.load(at, (place >= 0) & (y < BYTES) & (place % 4 < 2), 0)
    to = tl.program_id(0).to(tl.int64) * _ROWS + row
    tl.store(scales + to * BYTES + y, out, y < BYTES)


@triton.jit
def trit_index(half, row, eight):
    """Returns the index (int32) of eight columns in a half panel of base-3 digits: the digits as one number in base 3.
    half: pointers to the half's vectors of bytes, five digits each; see trits.py."""
    index = (row + eight) * 0
    for column in tl.static_range(8):
        quad = 2 * eight + column // 4
        octet = tl.load(half + quad // 5 * 64 + row % 16 * 4 + column % 4).to(tl.int32)
        for earlier in tl.static_range(4):  # digits before the wanted one
            octet = tl.where(earlier < quad % 5, octet * 3 & 255, octet)
        index = 3 * index + (octet * 3 >> 8)
    return index


@triton.jit
def move_trits(panels, codes, scales, part, K_BLOCKS: tl.constexpr):
    """Moves a panel's 32 rows of base-3 digits to uint8 `codes` and `scales`: part 0 moves the indices' low bytes, part
    1 the scale words. A K block of 128 columns has 8 bytes of the indices' nibbles, 2 of their highest bits, 2 of d."""
    eight, row = tl.arange(0, 16)[:, None], tl.arange(0, _ROWS)[None, :]
    panel = tl.program_id(0).to(tl.int64)
    to = panel * _ROWS + row
    for k_block in range(K_BLOCKS):
        block = panels + (panel * (K_BLOCKS // 2) + k_block // 2) * (32 * 54)
        half = block + 64 + row // 16 * (13 * 64)
        index = trit_index(half, row, k_block % 2 * 16 + eight)
        if part == 0:
            at = codes + to * (16 * K_BLOCKS) + k_block * 16
            tl.store(at + 4 * (eight % 4) + eight // 4, (index & 255).to(tl.uint8))
        else:
            at = scales + to * (12 * K_BLOCKS) + k_block * 12
            nibbles = tl.sum(tl.reshape(((index >> 8) & 15) << (4 * (eight % 2)), [8, 2, _ROWS]), 1)
            tl.store(at + tl.arange(0, 8)[:, None], nibbles.to(tl.uint8))
            tops = tl.sum(tl.reshape((index >> 12) << (eight % 8), [2, 8, _ROWS]), 1)
            two = tl.arange(0, 2)[:, None]
            tl.store(at + 8 + two, tops.to(tl.uint8))
            tl.store(at + 10 + two, tl.load(block + 2 * row + two))


@triton.jit
def move_part(
    panels, codes, scales, part, K_BLOCKS: tl.constexpr, F: tl.constexpr, X: tl.constexpr, Y: tl.constexpr
):
    """Moves part `part` of a panel's codes to the planes (uint8), or the scale words if `part` is the number of
    parts."""
    if F.signs == _INCLUDED:
        move_trits(panels, codes.to(tl.pointer_type(tl.uint8)), scales, part, K_BLOCKS)
    elif part < F.parts:
        move_book_codes(panels, codes, part, K_BLOCKS, F, X)
    else:
        move_book_words(panels, scales, K_BLOCKS, F, Y)


@kernel
def unpack_book_kernel(
    panels, codes, scales, K_BLOCKS: tl.constexpr, F: tl.constexpr, X: tl.constexpr, Y: tl.constexpr
):
    """Grid (panels, one program per part of the codes and one for the scales)."""
    move_part(panels, codes, scales, tl.program_id(1), K_BLOCKS, F, X, Y)


@kernel
def unpack_scattered_book_kernel(
    addresses, ROUNDS: tl.constexpr, K_BLOCKS: tl.constexpr, F: tl.constexpr, X: tl.constexpr, Y: tl.constexpr
):
    """Grid (panels of a matrix, parts + 1, matrices / ROUNDS); addresses as in unpack_scattered_kernel."""
    for turn in tl.static_range(ROUNDS):
        at = addresses + 4 * (turn * tl.num_programs(2) + tl.program_id(2))
        panels = tl.load(at)
        if panels != 0:
            codes = tl.load(at + 1).to(tl.pointer_type(tl.int32))
            scales = tl.load(at + 2).to(tl.pointer_type(tl.uint8))
            source = panels.to(tl.pointer_type(tl.uint8))
            move_part(source, codes, scales, tl.program_id(1), K_BLOCKS, F, X, Y)


def unpack_book_panels(
    panels: Tensor, codes: Tensor, scales: Tensor, book: Codebook, whole: int, cols: int
) -> None:
    """Launches the conversion of `whole` panels. panels uint8; codes int32, scales uint8: those of the planes."""
    unpack_book_kernel((whole, book.parts + 1), panels, codes, scales, *_sizes(book, cols), num_warps=4)


def unpack_scattered_books(addresses: Tensor, book: Codebook, rows: int, cols: int, rounds: int) -> None:
    """See `unpack_scattered`."""
    grid = rows // PANEL_ROWS, book.parts + 1, len(addresses) // rounds
    unpack_scattered_book_kernel(grid, addresses, rounds, *_sizes(book, cols), num_warps=4)


def _sizes(book: Codebook, cols: int) -> tuple[object, ...]:
    k_blocks = k_blocks_of(cols)
    return k_blocks, book, next_power_of_2(4 * k_blocks), next_power_of_2(4 * book.row_words(k_blocks))
