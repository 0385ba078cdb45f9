"""Descriptors with which the tensor memory accelerator (TMA) copies codes of 4 and of 6 bits into shared memory."""

# mypy: ignore-errors

from __future__ import annotations

from functools import cache

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moeserve.kernels.linear.integer_layouts import box_layout, row_box_layout


def code_boxes(codes: Tensor, cols: int, super_blocks: int) -> TensorDescriptor:
    """Returns the tensor memory accelerator's description of boxes of 32 rows, with all four parts, of `super_blocks`
    super-blocks of 256 columns. codes: int32 [.., rows, cols / 8], contiguous."""
    return TensorDescriptor.from_tensor(
        codes.view(-1, cols // 32), [128, 8 * super_blocks], _layout(super_blocks)
    )


def six_bit_boxes(codes: Tensor, cols: int, super_blocks: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Returns the description of boxes of 64 rows' low bits, and of their high bits. codes: int32 [.., rows, 6 parts,
    cols / 128, 4], contiguous: four parts of low bits, then two of high ones."""
    parts = codes.view(-1, 6, cols // 32)
    layout = _row_layout(super_blocks)
    return (
        TensorDescriptor.from_tensor(parts, [64, 4, 8 * super_blocks], layout),
        TensorDescriptor.from_tensor(parts, [64, 2, 8 * super_blocks], layout),
    )


@cache
def _row_layout(super_blocks: int) -> gl.NVMMASharedLayout:
    return row_box_layout(super_blocks)


@cache
def _layout(super_blocks: int) -> gl.NVMMASharedLayout:
    return box_layout(super_blocks)
