"""The base of towers whose patches lie in the order of tokens and whose heads rotate by row and column."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.models.sources.source import TensorSource
from moeserve.visualserver.towers.layer_norm import LayerNormShape, LayerNormTower
from moeserve.visualserver.towers.weights import InputFormat

ROPE_THETA: Final = 10000.0


class AxialTower(LayerNormTower):
    """All patches see each other. Heads rotate in split halves. In each half, a quarter of the head rotates by row and
    a quarter by column."""

    def __init__(
        self,
        source: TensorSource,
        shape: LayerNormShape,
        device: torch.device,
        inputs: InputFormat | None,
    ) -> None:
        super().__init__(source, shape, device, inputs)
        dims = shape.hidden // shape.heads // 4
        self._inverse = ROPE_THETA ** (-torch.arange(dims, dtype=torch.float64, device=device) / dims)

    def _frame_patches(self) -> tuple[Tensor, Tensor]:
        """Removes the patches' two matrices, one for each of two frames, from the weights, and returns them, each
        [hidden, 3 * patch * patch]."""
        first, second = (self.weights.pop(f"v.patch_embd.weight{name}") for name in ("", ".1"))
        return first.flatten(1), second.flatten(1)

    def _still_patches(self) -> Tensor:
        """Returns the sum of `_frame_patches`: a still picture is the same in both frames."""
        first, second = self._frame_patches()
        return first + second

    def _joined(self, x: Tensor) -> Tensor:
        """Joins the patches of each token: [tokens, merge * merge * hidden]."""
        return x.view(-1, self._sizes.hidden * self._sizes.merge**2)

    def _angles(self, columns: int, order: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cos and sin of a head's first half, float32 [patches, head / 2]: a quarter of the head by row, a
        quarter by column."""
        row, column = order // columns, order % columns
        angles = torch.stack((row, column), 1).double()[:, :, None] * self._inverse
        flat = angles.flatten(1)
        return flat.cos().float(), flat.sin().float()


def merge_order(rows: int, columns: int, merge: int) -> Tensor:
    """Returns the patches' indices, int64 [rows * columns], counted row by row, in the tower's order: the merge * merge
    patches of a token follow one another."""
    count = torch.arange(rows * columns)
    return count.view(rows // merge, merge, columns // merge, merge).permute(0, 2, 1, 3).flatten()


def pairs_in_split_halves(hidden: int, heads: int) -> Tensor:
    """Returns the file's row for each row of `AxialTower`'s q and k, int64 [hidden]. In the file the first half of each
    head rotates by column and the second half by row, and each number rotates with its neighbour."""
    count = torch.arange(hidden).view(heads, 2, -1, 2)  # [heads, column or row, frequency, pair]
    return count.flip(1).permute(0, 3, 1, 2).flatten()


def bicubic_positions(table: Tensor, rows: int, columns: int) -> Tensor:
    """Returns a learned table of positions [rows, columns, hidden], resampled to the patches of a picture: [patches,
    hidden], row by row, in the table's dtype."""
    grid = table.permute(2, 0, 1)[None]
    found = functional.interpolate(grid, (rows, columns), mode="bicubic", align_corners=False)
    return found[0].permute(1, 2, 0).reshape(rows * columns, -1)
