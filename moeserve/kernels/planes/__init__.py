"""The GPU's layout of GGUF weights: the codes and scales of a matrix in planes that a warp reads in 16-byte pieces.

GGUF interleaves a block's codes and scales (144 bytes a block of Q4_K), which a GPU can only read byte by byte. Planes
hold the same numbers, lossless, split by kind. A row is cut into **k blocks** of 128 columns, a k block into 8
**fields** of 16 columns:

    codes   uint8 [experts, rows, parts, k blocks, 16]
            low parts first: byte t of part p holds column t of fields ...
                4-bit codes: 2p (low nibble) and 2p + 1 (high nibble); 4 parts
                2-bit codes: 4p .. 4p + 3, two bits each from the lowest; 2 parts
                8-bit codes: p; 8 parts
            then the high bits of 5-, 6- and 3-bit codes, where there are any:
                1 bit:  all 8 fields, field f in bit f; 1 part
                2 bits: 4p .. 4p + 3, two bits each; 2 parts
    scales  int32 [experts, rows, k blocks, words]: the scales of a k block's groups (of 16 or 32 columns), see
            `quantization.Scale`
    supers  int32 [experts, rows, super-blocks of 256 columns]: float16 d, and float16 dmin in the upper half

A weight is s * (code - offset) - m with its group's scale s and min m. Rows whose columns are no multiple of 128 are
padded with zeros; a row has `cols` columns all the same.

F16, BF16 and F32 matrices are kept as they are: `codes` is the float tensor [experts, rows, cols].
`repack.py` makes planes from GGUF bytes, `dequantize.py` is their meaning in plain torch, `triton.py` reads them in
kernels.
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
