"""The GPU's layout of GGUF weights: a matrix's codes and scales in planes that a warp reads in 16-byte pieces.

GGUF interleaves a block's codes and scales (144 bytes per block of Q4_K), which a GPU can only read byte by byte.
Planes hold the same numbers, lossless, separated by kind. A row is cut into **k blocks** of 128 columns, a k block
into 8 **fields** of 16 columns:

    codes   uint8 [experts, rows, parts, k blocks, 16]
            low parts first: byte t of part p holds column t of fields ...
                4-bit codes: 2p (low nibble) and 2p + 1 (high nibble); 4 parts
                2-bit codes: 4p .. 4p + 3, two bits each from the lowest; 2 parts
                8-bit codes: p; 8 parts
            then the high bits of 5-, 6- and 3-bit codes, if any:
                1 bit:  all 8 fields, field f in bit f; 1 part
                2 bits: 4p .. 4p + 3, two bits each; 2 parts
    scales  int32 [experts, rows, k blocks, words]: the scales of a k block's groups (of 16 or 32 columns), see
            `quantization.Scale`
    supers  int32 [experts, rows, super-blocks of 256 columns]: float16 d, and float16 dmin in the upper half

A weight is s * (code - offset) - m with its group's scale s and min m. Rows whose number of columns is not a
multiple of 128 are padded with zeros; `cols` does not count the padding.

F16, BF16 and F32 matrices keep their form: `codes` is the float tensor [experts, rows, cols]. `repack.py` makes
planes from GGUF bytes, `dequantize.py` is their specification in plain torch, and kernels read them with
`triton.py`.
"""

from moeserve.kernels.planes.dequantize import dequantize
from moeserve.kernels.planes.layout import K_BLOCK, Planes
from moeserve.kernels.planes.repack import empty_planes, repack, repack_into

__all__ = [
    "K_BLOCK",
    "Planes",
    "dequantize",
    "empty_planes",
    "repack",
    "repack_into",
]
