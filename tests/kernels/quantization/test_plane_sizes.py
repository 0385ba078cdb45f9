"""What the placement says of planes' bytes is what the kernels make of a tensor."""

from __future__ import annotations

import pytest

from moeserve.kernels.planes import empty_planes
from moeserve.models.sources.gguf import TensorInfo
from moeserve.placement.sizes import plane_bytes
from moeserve.quantization import QUANT_TYPES, QuantType
from moeserve.quantization.table import NVFP4_TYPES

ROWS_OF_TYPES = [
    (kind, cols)
    for kind in QUANT_TYPES.values()
    for cols in (256, 512, 800)
    if kind.gpu and not cols % kind.block_columns
]


@pytest.mark.parametrize(("kind", "cols"), ROWS_OF_TYPES, ids=lambda value: getattr(value, "name", value))
def test_planes_take_what_the_gpu_kernels_make_of_them(kind: QuantType, cols: int) -> None:
    tensor = TensorInfo("t", (2, 3, cols), kind, kind.row_bytes(cols) * 6)
    assert plane_bytes(tensor) == empty_planes(kind, tensor.shape, "meta").nbytes
    if kind.is_quantised and cols % 256 == 0:
        # Blocks of NVFP4_G64 and G128 repeat the matrix's scale, which planes have once in 256 columns.
        repeated = 4 * (cols // kind.block_columns - cols // 256) * 6 if kind in NVFP4_TYPES.values() else 0
        assert tensor.nbytes - repeated <= plane_bytes(tensor) <= 1.06 * tensor.nbytes
