"""What the placement says of planes' bytes is what the kernels make of a tensor."""

from __future__ import annotations

import pytest
from gguf.constants import GGMLQuantizationType

from moeserve.kernels.planes import GgmlType, empty_planes
from moeserve.models.gguf import TensorInfo
from moeserve.models.gguf.quant_types import QUANT_TYPES, UNQUANTISED
from moeserve.placement.sizes import plane_bytes

ROWS_OF_TYPES = [
    (kind, cols)
    for kind in QUANT_TYPES
    for cols in (256, 512, 800)
    if not cols % QUANT_TYPES[kind].block_size
]


@pytest.mark.parametrize(("kind", "cols"), ROWS_OF_TYPES, ids=lambda value: getattr(value, "name", value))
def test_planes_take_what_the_gpu_kernels_make_of_them(kind: GGMLQuantizationType, cols: int) -> None:
    tensor = TensorInfo("t", (2, 3, cols), kind, QUANT_TYPES[kind].row_bytes(cols) * 6)
    assert plane_bytes(tensor) == empty_planes(GgmlType(int(kind)), tensor.shape, "meta").nbytes
    if kind not in UNQUANTISED and cols % 256 == 0:
        assert tensor.nbytes <= plane_bytes(tensor) <= 1.06 * tensor.nbytes
