"""Converts the CPU pool's panels to planes: a permutation, in plain torch on the device of the panels' bytes.
`panels_triton.py` has it as kernels.

`csrc/formats/panel_layout.h` describes panels. A panel is 32 rows. Each block column (256 or 32 columns of the
format) has a header with the rows' scales as in the GGUF block, byte by byte; then, for each group of 32 columns
and each half of 16 rows, vectors of 64 bytes [16 rows][4 columns]. A nibble vector has the same bytes as the
planes' low parts, so the codes of 4-bit types only move, four bytes at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.kernels._C import PANEL_ROWS
from moeserve.kernels.planes.books import BookBytes, pack_codes, pack_words
from moeserve.kernels.planes.layout import K_BLOCK, Planes, supers_of
from moeserve.kernels.planes.repack import pack_scales, unpack_scales
from moeserve.kernels.planes.trits import trit_panel_bytes
from moeserve.quantization import BlockLayout, QuantType
from moeserve.quantization.codebook import Codebook

GROUP = 32  # columns
VECTOR = 64  # bytes
GROUPS = K_BLOCK // GROUP  # per k block


@dataclass(frozen=True, slots=True)
class PanelLayout:
    """A type's panel layout: the same numbers that `csrc/formats/panel_layout.h` computes from the type's row in the
    table of types."""

    cols: int  # per block column
    halves: int  # float16 numbers per row in the header
    octets: int  # bytes per row in the header after them
    bits: int  # vectors of each kind, per group and half
    pairs: int
    codes: int  # 4: nibbles, 8: bytes

    @classmethod
    def of(cls, kind: QuantType, f: BlockLayout) -> PanelLayout:
        return cls(
            cols=kind.block_columns,
            halves=f.halves,
            octets=f.octets,
            bits=1 if 1 in (f.low_bits, f.high_bits) else 0,
            pairs=2 if 2 in (f.low_bits, f.high_bits) else 0,
            codes=0 if f.low_bits < 4 else f.low_bits,
        )

    @property
    def header(self) -> int:
        return PANEL_ROWS * (2 * self.halves + self.octets)

    @property
    def vectors(self) -> int:
        return self.bits + self.pairs + self.codes

    @property
    def block_bytes(self) -> int:
        return self.header + self.cols // GROUP * 2 * self.vectors * VECTOR


def panels_to_planes(panels: Tensor, planes: Planes) -> None:
    """Converts panels, and writes the result to `planes`. panels: flat uint8, the bytes of a `_C.Matrix` that has the
    planes' type and shape and was packed for one NUMA node; on the planes' device. Raises ValueError if the sizes
    differ."""
    count = planes.experts * -(-planes.rows // PANEL_ROWS)
    if planes.rows % PANEL_ROWS:
        raise ValueError(f"{planes.rows} rows are not a multiple of a panel's 32")
    if (book := planes.type.plane_book) is not None:
        _move_book(panels.view(count, -1), book, planes)
        return
    f = planes.type.layout
    if f is None:
        floats = panels.view(planes.codes.dtype).view(count, planes.cols, PANEL_ROWS)
        planes.codes.view(count, PANEL_ROWS, planes.cols).copy_(floats.transpose(1, 2))
        return
    layout = PanelLayout.of(planes.type, f)
    blocks = planes.cols // layout.cols
    if panels.numel() != count * blocks * layout.block_bytes:
        raise ValueError(
            f"{panels.numel()} bytes of panels are not {planes.experts} x {planes.rows} x {planes.cols}"
        )
    whole = panels.view(count, blocks, layout.block_bytes)
    _move_scales(whole[..., : layout.header], layout, f, planes)
    vectors = whole[..., layout.header :].view(count, blocks, -1, 2, layout.vectors, VECTOR)
    _move_codes(_by_k_block(vectors), layout, f, planes)


def _move_book(panels: Tensor, book: Codebook, planes: Planes) -> None:
    """panels: uint8 [panels, bytes]."""
    kind = planes.type
    blocks = panels.view(len(panels), -1, PANEL_ROWS * kind.block_bytes)
    if blocks.shape[1] * kind.block_columns != planes.cols:
        raise ValueError(
            f"{panels.numel()} bytes of panels are not {planes.experts} x {planes.rows} x {planes.cols}"
        )
    is_trits = kind.trit_book is not None
    given = trit_panel_bytes(blocks) if is_trits else _book_panel_bytes(blocks, kind, book)
    rows = len(panels) * PANEL_ROWS
    planes.codes.view(rows, *planes.codes.shape[2:]).copy_(pack_codes(book, given))
    planes.scales.view(rows, -1).copy_(pack_words(book, given))


def _book_panel_bytes(blocks: Tensor, kind: QuantType, book: Codebook) -> BookBytes:
    """blocks: uint8 [panels, blocks, bytes]. In panels an entry's bytes are in the file's order; the bytes of 16 rows
    are next to each other."""
    header = PANEL_ROWS * (2 * int(book.has_d) + book.octets)
    groups = blocks[..., header:].unflatten(2, (kind.block_columns // GROUP, 2, -1))
    widths = (
        GROUP // book.columns,
        0 if book.word is None else 4,
        0 if book.high is None else book.high.group,
    )
    low, word, high = (
        part.unflatten(-1, (width, 16) if i != 1 else (16, width)) if width else None
        for i, (width, part) in enumerate(
            zip(widths, groups.split([16 * width for width in widths], dim=-1), strict=True)
        )
    )

    def rows(part: Tensor) -> Tensor:
        """Reorders [panels, blocks, 8, half, row, bytes] to [panels * 32, blocks, 8, bytes]."""
        return part.permute(0, 3, 4, 1, 2, 5).flatten(0, 2)

    assert low is not None
    d = blocks[..., : 2 * PANEL_ROWS * int(book.has_d)].unflatten(-1, (-1, PANEL_ROWS, 2))
    octets = blocks[..., header - PANEL_ROWS * book.octets : header].unflatten(-1, (book.octets, PANEL_ROWS))
    return BookBytes(
        rows(low.transpose(-1, -2)),
        None if word is None else rows(word),
        None if high is None else rows(high.transpose(-1, -2)),
        octets.permute(0, 3, 1, 2).flatten(0, 1),
        d.permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1),
    )


def _by_k_block(vectors: Tensor) -> Tensor:
    """Reshapes [panels, blocks, groups per block, ..] to [panels, k blocks, groups per k block, ..], padded with
    zeros."""
    grouped = vectors.flatten(1, 2)
    missing = -grouped.shape[1] % GROUPS
    if missing:
        grouped = torch.cat([grouped, grouped.new_zeros(len(grouped), missing, *grouped.shape[2:])], dim=1)
    by_k_block: Tensor = grouped.unflatten(1, (-1, GROUPS))
    return by_k_block


def _move_codes(vectors: Tensor, layout: PanelLayout, f: BlockLayout, planes: Planes) -> None:
    """vectors: uint8 [panels, k blocks, 4 groups, 2 halves, vectors, 64]."""
    panels, k_blocks = vectors.shape[:2]
    # [.., half, row, part, k block, i, c]
    to = planes.codes.view(panels, 2, 16, f.low_parts + f.high_parts, k_blocks, 4, 4)
    at = 0
    if layout.bits:
        to[:, :, :, f.low_parts if f.high_bits else 0].copy_(_bit_part(vectors[..., 0, :]))
        at = 1
    if layout.pairs:
        first = f.low_parts if layout.codes else 0
        to[:, :, :, first : first + 2].copy_(_pair_parts(vectors[..., at : at + 2, :]))
        at += 2
    if layout.codes:
        _move_whole_bytes(vectors[..., at:, :], to[:, :, :, : f.low_parts], layout.codes)


def _move_whole_bytes(vectors: Tensor, to: Tensor, count: int) -> None:
    """Nibble vector i of group g becomes bytes 4i .. of part g. Byte vector i becomes part 2g + i / 4, minus its
    bias of 128."""
    words = vectors.view(torch.int32)  # [panels, k blocks, group, half, vector, row]
    by_part = words.unflatten(4, (-1, 4)).permute(0, 3, 6, 2, 4, 1, 5).flatten(3, 4)
    target = to.view(torch.int32)[..., 0]
    if count == 8:
        by_part = by_part ^ -0x7F7F7F80  # 0x80808080
    target.copy_(by_part)


def _bit_part(vectors: Tensor) -> Tensor:
    """Converts uint8 [panels, k blocks, group, half, 64], where bit q of byte (row, c) is column 4q + c of the
    group, to [panels, half, row, k block, i, c], where bit f is column 4i + c of the k block's field f."""
    b: Tensor = vectors.unflatten(-1, (16, 4))  # [panels, k blocks, group, half, row, c]
    shifts = torch.arange(4, dtype=torch.uint8, device=b.device)
    out = None
    for field in range(8):
        bits = (b[:, :, field // 2, ..., None, :] >> (shifts[:, None] + 4 * (field % 2))) & 1
        out = bits if out is None else out | bits << field
    assert out is not None
    return out.permute(0, 2, 3, 1, 4, 5)


def _pair_parts(vectors: Tensor) -> Tensor:
    """Converts uint8 [panels, k blocks, group, half, 2, 64], where bits 2i of byte (row, c) of vector j are column
    16j + 4i + c of the group, to [panels, half, row, part, k block, i, c], where bits 2k are column 4i + c of field
    4 part + k."""
    b = vectors.unflatten(-1, (16, 4))  # [panels, k blocks, group, half, j, row, c]
    shifts = 2 * torch.arange(4, dtype=torch.uint8, device=b.device)
    parts = []
    for part in range(2):
        out = None
        for k in range(4):
            field = 4 * part + k
            pairs = (b[:, :, field // 2, :, field % 2, :, None, :] >> shifts[:, None]) & 3
            out = pairs if out is None else out | pairs << (2 * k)
        assert out is not None
        parts.append(out)
    return torch.stack(parts, dim=-1).permute(0, 2, 3, 6, 1, 4, 5)


def _move_scales(header: Tensor, layout: PanelLayout, f: BlockLayout, planes: Planes) -> None:
    """header: uint8 [panels, blocks, bytes]."""
    split = 2 * layout.halves * PANEL_ROWS
    halves = header[..., :split].unflatten(-1, (layout.halves, PANEL_ROWS, 2)).transpose(2, 3).flatten(3)
    octets = header[..., split:].unflatten(-1, (layout.octets, PANEL_ROWS)).transpose(2, 3)
    # In GGUF block order: [panels * 32 rows, blocks, bytes].
    halves, octets = (x.transpose(1, 2).flatten(0, 1) for x in (halves, octets))
    scales = unpack_scales(f, halves, octets, codes=halves[..., :0])
    rows = planes.experts * planes.rows
    if f.words:
        planes.scales.view(rows, -1, f.words).copy_(pack_scales(f, scales))
    if scales.supers is not None:
        words = scales.supers.flatten().contiguous().view(torch.int32)
        planes.supers.view(rows, supers_of(planes.cols)).copy_(words.view(rows, -1))
