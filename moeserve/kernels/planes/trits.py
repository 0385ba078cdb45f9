"""Base-3 digits (TQ1_0) as a GPU's planes hold them: eight columns are one index, in 13 bits, into
`ternary_entries`: the 6,561 = 3^8 combinations of eight codes.

A block has five digits in most bytes and four in others, so that the digits of a k block cross bytes and blocks. The
indices take as many bytes as the file (52 for 256 columns), and kernels look them up as those of a codebook (books.py):
a low byte, a nibble and a bit of each. A k block's last word has the 16 highest bits, then d.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.kernels.planes.books import BookBytes
from moeserve.quantization.quant_type import QuantType, TritRun, Trits

VECTOR = 64  # bytes of a panel: 16 rows' digits of 4 columns
DIGITS = 5  # of a panel's bytes


def trit_bytes(kind: QuantType, blocks: Tensor) -> BookBytes:
    """Converts GGUF blocks: uint8 [rows, blocks, block bytes]."""
    layout = kind.layout
    assert layout is not None
    assert isinstance(layout.low, Trits)
    codes = torch.cat([_digits(blocks, run) for run in layout.low.runs], dim=-1)
    return _as_indices(codes, blocks[..., layout.halves_at : layout.halves_at + 2])


def trit_panel_bytes(blocks: Tensor) -> BookBytes:
    """Returns the bytes of planes for block columns of panels (csrc/formats/panel_layout.h), uint8 [panels, blocks,
    bytes]. Vector i of a half has quads 5 i to 5 i + 4, a digit each."""
    # Imported here, because only panels need the C++ extension; `repack.py` imports this module too.
    from moeserve.kernels._C import PANEL_ROWS

    header = 2 * PANEL_ROWS
    vectors = blocks[..., header:].unflatten(
        -1, (2, -1, 1, 16, 4)
    )  # [panels, blocks, half, vector, 1, row, column]
    digits = _digits_of(vectors, torch.arange(DIGITS, device=blocks.device)[:, None, None])
    quads = digits.flatten(3, 4)[:, :, :, :64]  # [panels, blocks, half, quad, row, column]
    codes = quads.permute(0, 2, 4, 1, 3, 5).flatten(4).flatten(0, 2)
    d = blocks[..., :header].unflatten(-1, (PANEL_ROWS, 2)).transpose(1, 2).flatten(0, 1)
    return _as_indices(codes, d)


def _digits(blocks: Tensor, run: TritRun) -> Tensor:
    """Returns the codes of a run's columns in order: uint8 [rows, blocks, columns]."""
    octets = blocks[..., None, run.at : run.at + run.width]
    return _digits_of(octets, torch.arange(run.digits, device=blocks.device)[:, None]).flatten(-2)


def _digits_of(octets: Tensor, number: Tensor) -> Tensor:
    """Returns digits of bytes, uint8; number: which ones, most significant first."""
    return (octets.short() * (3**number).short() % 256 * 3 >> 8).to(torch.uint8)


def _as_indices(codes: Tensor, d: Tensor) -> BookBytes:
    """codes: uint8 [rows, blocks, 256], of 0, 1 and 2; d: [rows, blocks, 2]."""
    eights = codes.unflatten(-1, (8, 4, 8))  # [rows, blocks, g, j, column]
    index = eights[..., 0].short()
    for column in range(1, 8):
        index = 3 * index + eights[..., column]
    j = torch.arange(4, device=codes.device)
    nibbles = (index >> 8 & 15).unflatten(-1, (2, 2))
    tops = (index >> 12).flatten(-2).unflatten(-1, (4, 8)) << torch.cat([j, j + 4])
    return BookBytes(
        low=(index & 255).to(torch.uint8),
        word=None,
        high=(nibbles[..., 0] | nibbles[..., 1] << 4).to(torch.uint8),
        octets=tops.sum(-1).to(torch.uint8),
        d=d,
    )
