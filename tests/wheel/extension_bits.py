"""`PYTHON extension_bits.py`: prints checksums of what the installed wheel's extension computes. It needs numpy alone.

Two machines whose lines are the same read weights of every type alike, and draw the same random numbers. Packing and
products need PyTorch: tests/kernels/pool/test_aarch64.py compares those without Python.
"""

from __future__ import annotations

import importlib
import zlib

import numpy as np

COLUMNS = 512
ROWS = 8


def main() -> None:
    extension = importlib.import_module(
        "moeserve.kernels._C"
    )  # moeserve.kernels itself has more than this needs
    for kind in extension.quant_types():
        if kind.book[0][0]:
            continue  # its codebook comes from the gguf package
        row_bytes = COLUMNS // kind.block_columns * kind.block_bytes
        blocks = np.random.RandomState(kind.number).randint(0, 256, (ROWS, row_bytes)).astype(np.uint8)
        values = np.empty((ROWS, COLUMNS), np.float32)
        for row in range(ROWS):
            extension.dequantize_row(kind.number, blocks[row].ctypes.data, COLUMNS, values[row].ctypes.data)
        values[np.isnan(values)] = 0  # of random scales; which bits a NaN has is up to the CPU
        print(kind.name, f"{zlib.crc32(values.tobytes()):08x}")
    draws = np.array([extension.uniform_at(7, position) for position in range(100)])
    print("uniform", f"{zlib.crc32(draws.tobytes()):08x}")


if __name__ == "__main__":
    main()
