"""Which tables of codes are looked up without their signs. What comes of it, the tests of products say."""

from __future__ import annotations

import tests.kernels.triton_device  # noqa: F401  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.linear.mirrored_table import has_mirrored_table
from moeserve.quantization import QUANT_TYPES


def test_tables() -> None:
    """IQ4's levels below 0 are others than those above, and both codes of a byte of NVFP4's are of two groups."""
    layouts = {
        kind.name: kind.layout for kind in QUANT_TYPES.values() if kind.layout is not None and kind.gpu
    }
    assert {name for name, layout in layouts.items() if has_mirrored_table(layout)} == {"MXFP4"}
    assert {name for name, layout in layouts.items() if layout.table is not None} == {
        "MXFP4",
        "NVFP4",
        "NVFP4_G64",
        "NVFP4_G128",
        "NVFP4_G256",
        "IQ4_NL",
        "IQ4_XS",
        "Q1_0",
    }
