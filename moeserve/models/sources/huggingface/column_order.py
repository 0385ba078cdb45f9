"""Matrices quantised with act-order (`desc_act`): the columns of a group may lie anywhere in a row. Blocks need them
side by side, so the columns are sorted by group, and products gather their input in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moeserve.models.errors import ModelError

from .bit_stream import packed_bits, unpacked_bits
from .made_tensor import find_part, misfit
from .safetensors_file import StoredTensor, stored_numbers

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Order = npt.NDArray[np.int32]


def columns_of(path: Path, stored: dict[str, StoredTensor], name: str, cols: int) -> StoredTensor:
    """Returns the stored tensor (I32 or I64 [cols]) with the quantisation group of each column. Raises ModelError if it
    is missing or has another length."""
    groups = find_part(path, stored, name, ("I32", "I64"), 1)
    if groups.shape != (cols,):
        raise misfit(path, name.rpartition(".")[0])
    return groups


def column_order(path: Path, groups_of: StoredTensor, groups: int) -> Order | None:
    """Returns int32 [cols]: the columns sorted by group, and by position within a group; None if they have this order
    already. groups_of: integers [cols], each column's group (g_idx). Raises ModelError if the groups differ in size."""
    of_column = stored_numbers(groups_of).astype(np.int64)
    (cols,) = of_column.shape
    each = cols // groups
    if cols % groups or of_column.min() < 0 or of_column.max() >= groups:
        raise misfit(path, groups_of.name.rpartition(".")[0])
    if (np.bincount(of_column, minlength=groups) != each).any():
        raise ModelError(
            path,
            f"tensor {groups_of.name!r} has groups of different sizes; {each} columns in each are expected; download "
            "the file again, or another checkpoint",
        )
    if (of_column == np.arange(cols) // each).all():
        return None
    return np.argsort(of_column, kind="stable").astype(np.int32)


def stacked(orders: Sequence[Order | None], shape: tuple[int, ...]) -> Order | None:
    """Returns the orders of a tensor's matrices. For experts, [E, out, in], the orders, each [size], become [E, size];
    any other tensor has one order. Returns None if no matrix has an order."""
    some = next((order for order in orders if order is not None), None)
    if some is None:
        return None
    plain = np.arange(len(some), dtype=np.int32)
    found = np.stack([plain if order is None else order for order in orders])
    return found if len(shape) == 3 else found[0]


def in_order(codes: Bytes, order: Order | None, bits: int) -> Bytes:
    """Returns codes of 2, 3, 4 or 8 bits, uint8 [rows, cols * bits / 8], lowest bits first, with their columns in
    `order`."""
    if order is None:
        return codes
    if bits == 8:
        return codes[:, order]
    if bits != 4:
        return packed_bits(unpacked_bits(codes, bits)[:, order], bits)
    half, is_high = order >> 1, (order & 1).astype(np.uint8) * np.uint8(4)
    low, high = (codes[:, half[i::2]] >> is_high[i::2] & np.uint8(15) for i in (0, 1))
    return low | high << np.uint8(4)
