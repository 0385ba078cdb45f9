"""Converts the CPU pool's panels to planes on a GPU, in one launch, as `from_panels.py` specifies (same terms).

Panels have 16 rows' words of four codes next to each other, planes the words of one row: a transposition.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.kernels._C import PANEL_ROWS
from moeserve.kernels.launch import kernel, next_power_of_2
from moeserve.kernels.planes.book_panels_triton import unpack_book_panels, unpack_scattered_books
from moeserve.kernels.planes.from_panels import GROUP, PanelLayout, panels_to_planes
from moeserve.kernels.planes.layout import Planes, k_blocks_of
from moeserve.quantization import QuantType, StoredScales

_SIX_BIT_MIN = tl.constexpr(int(StoredScales.SIX_BIT_MIN))
_SIX_BIT_Q3_K = tl.constexpr(int(StoredScales.SIX_BIT_Q3_K))
_SIX_BIT_IQ4_XS = tl.constexpr(int(StoredScales.SIX_BIT_IQ4_XS))
_F16 = tl.constexpr(int(StoredScales.F16))
_F16_ZERO = tl.constexpr(int(StoredScales.F16_ZERO))
_BF16_ZERO = tl.constexpr(int(StoredScales.BF16_ZERO))
_UE4M3_F32 = tl.constexpr(int(StoredScales.UE4M3_F32))
_ROWS = tl.constexpr(PANEL_ROWS)


@triton.jit
def move_codes(
    panels, codes, part,
    K_BLOCKS: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr, PANEL: tl.constexpr, HEADER: tl.constexpr, BITS: tl.constexpr, PAIRS: tl.constexpr,
    NIBBLES_OR_BYTES: tl.constexpr, X: tl.constexpr,
):  # fmt: skip
    """Moves one part of a panel's 32 rows. panels, codes: int32 words of four codes.

    K_BLOCKS and GROUPS (of 32 columns) per row, BLOCK_GROUPS per block; BLOCK, PANEL, HEADER in words; then the
    layout's number of vectors of each kind. X: a power of two of at least 4 K_BLOCKS, the words of a row's part.
    """
    row, x = tl.arange(0, _ROWS)[None, :], tl.arange(0, X)[:, None]
    first_group, i = x // 4 * 4, x % 4
    VECTORS: tl.constexpr = BITS + PAIRS + NIBBLES_OR_BYTES
    base = panels + tl.program_id(0).to(tl.int64) * PANEL + HEADER + row // 16 * (VECTORS * 16) + row % 16
    LOW: tl.constexpr = NIBBLES_OR_BYTES if NIBBLES_OR_BYTES > 0 else PAIRS
    out = tl.zeros([X, _ROWS], tl.int32)
    if (NIBBLES_OR_BYTES > 0) & (part < LOW):
        group, vector = first_group + part * 4 // LOW, BITS + PAIRS + part * 4 % LOW + i
        at = group // BLOCK_GROUPS * BLOCK + group % BLOCK_GROUPS * (2 * VECTORS * 16) + vector * 16
        out = tl.load(base + at, (group < GROUPS) & (x < 4 * K_BLOCKS), 0)
        if NIBBLES_OR_BYTES == 8:
            out = out ^ -0x7F7F7F80  # removes the bytes' bias of 128
    elif (BITS > 0) & (part == PARTS - 1):
        for field in tl.static_range(8):
            group = first_group + field // 2
            at = group // BLOCK_GROUPS * BLOCK + group % BLOCK_GROUPS * (2 * VECTORS * 16)
            word = tl.load(base + at, (group < GROUPS) & (x < 4 * K_BLOCKS), 0)
            out |= ((word >> (i + 4 * (field % 2))) & 0x01010101) << field
    else:
        pair_part = part - (PARTS - (BITS > 0) - PAIRS)
        for k in tl.static_range(4):
            group = first_group + 2 * pair_part + k // 2
            at = (
                group // BLOCK_GROUPS * BLOCK
                + group % BLOCK_GROUPS * (2 * VECTORS * 16)
                + (BITS + k % 2) * 16
            )
            word = tl.load(base + at, (group < GROUPS) & (x < 4 * K_BLOCKS), 0)
            out |= ((word >> (2 * i)) & 0x03030303) << (2 * k)
    to = (tl.program_id(0).to(tl.int64) * _ROWS + row) * PARTS + part
    tl.store(codes + to * (4 * K_BLOCKS) + x, out, x < 4 * K_BLOCKS)


@triton.jit
def move_scales(
    panels, scales, supers,
    STORED: tl.constexpr, BYTES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr, HALVES: tl.constexpr, OCTETS: tl.constexpr, Y: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Moves the scales of a panel's 32 rows. panels, scales: bytes; supers: int32, if the type has any.

    STORED: quantization.StoredScales; BYTES: scale bytes per row; BLOCKS per row, with BLOCK_GROUPS scales each (of
    float32: bytes of a scale), BLOCK in bytes; the header's halves and octets. Y, S: powers of two of at least BYTES
    and BLOCKS.
    """
    row, y = tl.arange(0, _ROWS)[None, :], tl.arange(0, Y)[:, None]
    base = panels + tl.program_id(0).to(tl.int64) * (BLOCKS * BLOCK)
    octets = base + 2 * HALVES * _ROWS + row
    if OCTETS == 0:  # float16: a scale, and a min if the type has one
        block, byte = y // (2 * HALVES), y % (2 * HALVES)
        live = (y < BYTES) & (block < BLOCKS)
        out = tl.load(base + block * BLOCK + byte // 2 * (2 * _ROWS) + 2 * row + byte % 2, live, 0)
    elif (STORED == _F16_ZERO) | (STORED == _BF16_ZERO):
        if BLOCK_GROUPS > 1:  # a word per block: the half, then the byte
            half_block, byte = y // 4, y % 4
            zero_block, is_half, is_zero = half_block, byte < 2, byte == 2
        else:  # the halves of a k block's four blocks, then the bytes
            half_block, byte = y // 12 * 4 + y % 12 // 2, y % 2
            zero_block, is_half = y // 12 * 4 + (y % 12 - 8), y % 12 < 8
            is_zero = y % 12 >= 8
        is_half &= (y < BYTES) & (half_block < BLOCKS)
        is_zero &= (y < BYTES) & (zero_block < BLOCKS)
        half = tl.load(base + half_block * BLOCK + 2 * row + byte, is_half, 0)
        zero = tl.load(octets + zero_block * BLOCK, is_zero, 0)
        out = tl.where(is_zero, zero, half)
    elif STORED == _SIX_BIT_MIN:
        # Of a k block's 8 bytes, 0 .. 3 are scales and 4 .. 7 mins. The block's first four groups have theirs in
        # the lower six bits of octets 0 .. 3 and 4 .. 7; the other groups have a nibble each in octets 8 .. 11, and
        # two bits above the former ones.
        block, is_min, j = y // 16, y // 4 % 2, y % 4
        live = (y < BYTES) & (block < BLOCKS)
        own = tl.load(octets + block * BLOCK + (4 * is_min + j) * _ROWS, live, 0)
        last = tl.load(octets + block * BLOCK + (8 + j) * _ROWS, live, 0)
        out = tl.where(
            y // 8 % 2 == 0, own & 63, ((last >> (4 * is_min).to(tl.uint8)) & 15) | (own >> 6 << 4)
        )
    else:
        block, j = y // BLOCK_GROUPS, y % BLOCK_GROUPS
        live = (y < BYTES) & (block < BLOCKS)
        at = octets + block * BLOCK
        if STORED == _UE4M3_F32:
            at += 4 * _ROWS
        if STORED == _SIX_BIT_Q3_K:  # nibbles of 8 bytes; their upper two bits are in 4 more bytes
            low = tl.load(at + j % 8 * _ROWS, live, 0) >> (j // 8 * 4).to(tl.uint8)
            high = tl.load(at + (8 + j % 4) * _ROWS, live, 0) >> (j // 4 * 2).to(tl.uint8)
            out = ((low & 15) | (high & 3) << 4) - 32
        elif STORED == _SIX_BIT_IQ4_XS:  # two upper bits in 2 bytes, then nibbles of 4
            low = tl.load(at + (2 + j // 2) * _ROWS, live, 0) >> (j % 2 * 4).to(tl.uint8)
            high = tl.load(at + j // 4 * _ROWS, live, 0) >> (j % 4 * 2).to(tl.uint8)
            out = ((low & 15) | (high & 3) << 4) - 32
        else:
            out = tl.load(at + j * _ROWS, live, 0)
    to = tl.program_id(0).to(tl.int64) * _ROWS + row
    tl.store(scales + to * BYTES + y, out.to(tl.uint8), y < BYTES)
    if supers is not None and STORED == _F16:
        s = tl.arange(0, S)[:, None]
        SUPERS: tl.constexpr = (BLOCKS * BLOCK_GROUPS + 7) // 8
        word = tl.zeros([S, _ROWS], tl.int32)
        for half in tl.static_range(2):  # of each k block
            block = (2 * s + half) * 4 // BLOCK_GROUPS
            for byte in tl.static_range(2):
                octet = tl.load(base + block * BLOCK + 2 * row + byte, block < BLOCKS, 0).to(tl.int32)
                word |= octet << (16 * half + 8 * byte)
        tl.store(supers + to * SUPERS + s, word, s < SUPERS)
    elif supers is not None and STORED == _UE4M3_F32:
        s = tl.arange(0, S)[:, None]
        EVERY: tl.constexpr = 16 // BLOCK_GROUPS
        COUNT: tl.constexpr = (BLOCKS + EVERY - 1) // EVERY
        word = tl.zeros([S, _ROWS], tl.int32)
        for byte in tl.static_range(4):
            octet = tl.load(octets + s * (EVERY * BLOCK) + byte * _ROWS, s < COUNT, 0).to(tl.int32)
            word |= octet << (8 * byte)
        tl.store(supers + to * COUNT + s, word, s < COUNT)
    elif supers is not None:
        s = tl.arange(0, S)[:, None]
        at = base + s * BLOCK + 2 * row
        word = tl.load(at, s < BLOCKS, 0).to(tl.int32) | tl.load(at + 1, s < BLOCKS, 0).to(tl.int32) << 8
        if HALVES == 2:
            word |= tl.load(at + 2 * _ROWS, s < BLOCKS, 0).to(tl.int32) << 16
            word |= tl.load(at + 2 * _ROWS + 1, s < BLOCKS, 0).to(tl.int32) << 24
        tl.store(supers + to * BLOCKS + s, word, s < BLOCKS)


@kernel
def unpack_kernel(
    panels, panel_bytes, codes, scales, supers,
    K_BLOCKS: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
    BITS: tl.constexpr, PAIRS: tl.constexpr, NIBBLES_OR_BYTES: tl.constexpr, STORED: tl.constexpr,
    SCALE_BYTES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_SCALES: tl.constexpr, BLOCK_BYTES: tl.constexpr,
    HALVES: tl.constexpr, OCTETS: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Grid (panels, PARTS programs for the codes and one for the scales). panels and panel_bytes are the same
    memory."""
    if tl.program_id(1) < PARTS:
        HEADER: tl.constexpr = _ROWS * (2 * HALVES + OCTETS) // 4
        move_codes(
            panels, codes, tl.program_id(1), K_BLOCKS, PARTS, GROUPS, BLOCK_GROUPS, BLOCK_BYTES // 4,
            BLOCKS * BLOCK_BYTES // 4, HEADER, BITS, PAIRS, NIBBLES_OR_BYTES, X,
        )  # fmt: skip
    else:
        move_scales(
            panel_bytes,
            scales,
            supers,
            STORED,
            SCALE_BYTES,
            BLOCKS,
            BLOCK_SCALES,
            BLOCK_BYTES,
            HALVES,
            OCTETS,
            Y,
            S,
        )


@kernel
def unpack_scattered_kernel(
    addresses, HAS_SUPERS: tl.constexpr, ROUNDS: tl.constexpr,
    K_BLOCKS: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
    BITS: tl.constexpr, PAIRS: tl.constexpr, NIBBLES_OR_BYTES: tl.constexpr, STORED: tl.constexpr,
    SCALE_BYTES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_SCALES: tl.constexpr, BLOCK_BYTES: tl.constexpr,
    HALVES: tl.constexpr, OCTETS: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Converts matrices in panels to planes; the panels may be anywhere in memory that the GPU reads. Grid (panels of a
    matrix, PARTS programs for the codes and one for the scales, programs with ROUNDS matrices each). addresses int64
    [matrices, 4]: each matrix's panels (0: no matrix), and the targets of its codes, scales and supers."""
    for turn in tl.static_range(ROUNDS):
        at = addresses + 4 * (turn * tl.num_programs(2) + tl.program_id(2))
        panels = tl.load(at)
        if panels != 0:
            if tl.program_id(1) < PARTS:
                HEADER: tl.constexpr = _ROWS * (2 * HALVES + OCTETS) // 4
                move_codes(
                    panels.to(tl.pointer_type(tl.int32)), tl.load(at + 1).to(tl.pointer_type(tl.int32)),
                    tl.program_id(1), K_BLOCKS, PARTS, GROUPS, BLOCK_GROUPS, BLOCK_BYTES // 4,
                    BLOCKS * BLOCK_BYTES // 4, HEADER, BITS, PAIRS, NIBBLES_OR_BYTES, X,
                )  # fmt: skip
            else:
                panel_bytes = panels.to(tl.pointer_type(tl.uint8))
                scales = tl.load(at + 2).to(tl.pointer_type(tl.uint8))
                if HAS_SUPERS:
                    move_scales(
                        panel_bytes, scales, tl.load(at + 3).to(tl.pointer_type(tl.int32)), STORED, SCALE_BYTES,
                        BLOCKS, BLOCK_SCALES, BLOCK_BYTES, HALVES, OCTETS, Y, S,
                    )  # fmt: skip
                else:
                    move_scales(
                        panel_bytes, scales, None, STORED, SCALE_BYTES, BLOCKS, BLOCK_SCALES, BLOCK_BYTES, HALVES,
                        OCTETS, Y, S,
                    )  # fmt: skip


def unpack_panels(panels: Tensor, planes: Planes, experts: int) -> None:
    """Launches the conversion of the first `experts` matrices of a stack from panels to `planes`; other experts' planes
    stay unchanged.

    panels: flat uint8, the bytes of the stack's `_C.Matrix`, on the planes' device, aligned to 16 bytes.
    """
    f, whole = planes.type.layout, experts * planes.rows // PANEL_ROWS
    if planes.type.plane_book is not None:
        codes, scales = planes.codes.view(torch.int32), planes.scales.view(torch.uint8)
        unpack_book_panels(panels, codes, scales, planes.type.plane_book, whole, planes.cols)
        return
    if f is None:
        none = planes.scales
        some = Planes(planes.type, experts, planes.rows, planes.cols, planes.codes[:experts], none, none)
        panels_to_planes(panels[: some.nbytes], some)
        return
    sizes = _sizes(planes.type, planes.cols)
    unpack_kernel(
        (whole, sizes[1] + 1),
        panels.view(torch.int32),
        panels,
        planes.codes.view(torch.int32),
        planes.scales.view(torch.uint8),
        planes.supers if f.has_super else None,
        *sizes,
        num_warps=4,
    )


def unpack_scattered(addresses: Tensor, kind: QuantType, rows: int, cols: int, rounds: int = 1) -> None:
    """Launches the conversion of matrices [rows, cols] of a quantised type from panels to planes, which may be anywhere
    on the addresses' device. Raises ValueError for a type of floats.

    addresses: int64 [matrices, 4]: each matrix's panels (0: no matrix), and its codes, scales and supers in planes
    (0 if the type has none), all aligned to 16 bytes. rounds: matrices that a program converts one after another, a
    divisor of their number; more than one for a table that is mostly empty.
    """
    if kind.plane_book is not None:
        unpack_scattered_books(addresses, kind.plane_book, rows, cols, rounds)
        return
    f = kind.layout
    if f is None:
        raise ValueError(f"{kind.name} is not quantised")
    sizes = _sizes(kind, cols)
    unpack_scattered_kernel(
        (rows // PANEL_ROWS, sizes[1] + 1, len(addresses) // rounds),
        *(addresses, f.has_super, rounds, *sizes),
        num_warps=4,
    )


def _sizes(kind: QuantType, cols: int) -> tuple[int, ...]:
    """Returns the kernels' constants of a type's rows: K_BLOCKS, PARTS and so on."""
    f = kind.layout
    assert f is not None
    layout, k_blocks = PanelLayout.of(kind, f), k_blocks_of(cols)
    blocks, scale_bytes = cols // layout.cols, 4 * f.words * k_blocks
    return (
        k_blocks,
        f.low_parts + f.high_parts,
        cols // GROUP,
        layout.cols // GROUP,
        layout.bits,
        layout.pairs,
        layout.codes,
        int(f.stored_scales),
        scale_bytes,
        blocks,
        4 if f.stored_scales == StoredScales.F32 else layout.cols // f.group,
        layout.block_bytes,
        layout.halves,
        layout.octets,
        next_power_of_2(4 * k_blocks),
        next_power_of_2(scale_bytes),
        next_power_of_2(blocks),
    )
