"""The table: a row for each type that is supported, the only list of them in Python.

Blocks are ggml's (https://github.com/ggml-org/ggml, `ggml-common.h`); gguf-py dequantises them, and tests hold our
reading to it. A new type is a row here, and for the C++ engine one of `kernels/csrc/formats/quant_types.h`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from moeserve.quantization.codebook import BookScales, ByteRun, Codebook, Signs
from moeserve.quantization.quant_type import (
    BitField,
    BlockLayout,
    CodeTable,
    QuantType,
    StoredScales,
    TritRun,
    Trits,
)

_rows: dict[int, QuantType] = {}
QUANT_TYPES: Mapping[int, QuantType] = MappingProxyType(_rows)  # by ggml's number


def _add(row: QuantType) -> QuantType:
    if row.number in _rows or row.name in (other.name for other in _rows.values()):
        raise ValueError(f"quantization type {row.name} ({row.number}) is in the table already")
    _rows[row.number] = row
    return row


@contextmanager
def registered(row: QuantType) -> Iterator[QuantType]:
    """Returns a context in which the table also has this row, for tests and experiments. Raises ValueError if the name
    or number exists."""
    _add(row)
    try:
        yield row
    finally:
        del _rows[row.number]


def supported_names() -> str:
    """Returns the names of the supported GGUF types, for messages and pages."""
    return ", ".join(row.name for row in QUANT_TYPES.values() if row.in_gguf)


IQ4_LEVELS = CodeTable((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
# Doubled; E8M0 is halved in turn.
E2M1_LEVELS = CodeTable((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))

SIGN_LEVELS = CodeTable((-1, 1))

_R, _B = ByteRun, BookScales
# Blocks of 256 base-3 digits in a GPU's planes: d, the indices' low bytes, their nibbles above, their highest bits.
TRIT_BOOK = Codebook(3**8, 8, 1, _R(2, 4), None, _R(34, 2), 4, Signs.INCLUDED, 32, _B.NONE, 50, 4, eighths=8)

_S, _F, _L = StoredScales, BitField, BlockLayout
# fmt: off
F32 = _add(QuantType("F32", 0, 1, 4, float_name="float32"))
F16 = _add(QuantType("F16", 1, 1, 2, float_name="float16"))
BF16 = _add(QuantType("BF16", 30, 1, 2, float_name="bfloat16"))
# Of numbers of experts and of tokens, which are no weights: not in QUANT_TYPES.
I32 = QuantType("I32", 26, 1, 4, float_name="int32", cpu=False, gpu=False)
I64 = QuantType("I64", 27, 1, 8, float_name="int64", cpu=False, gpu=False)
# BitField: first byte, width of a run, bits. Then a group's columns, how scales are stored, the halves' first byte.
Q4_0 = _add(QuantType("Q4_0", 2, 32, 18, _L(_F(2, 16, 4), 32, _S.F16, 0, offset=8)))
Q4_1 = _add(QuantType("Q4_1", 3, 32, 20, _L(_F(4, 16, 4), 32, _S.F16_MIN, 0)))
Q5_0 = _add(QuantType("Q5_0", 6, 32, 22, _L(_F(6, 16, 4), 32, _S.F16, 0, high=_F(2, 1, 1), offset=16)))
Q5_1 = _add(QuantType("Q5_1", 7, 32, 24, _L(_F(8, 16, 4), 32, _S.F16_MIN, 0, high=_F(4, 1, 1))))
Q8_0 = _add(QuantType("Q8_0", 8, 32, 34, _L(_F(2, 32, 8), 32, _S.F16, 0)))
# A super-block's also: the first of the scales' bytes, and how many.
Q2_K = _add(QuantType("Q2_K", 10, 256, 84, _L(_F(16, 32, 2), 16, _S.NIBBLE_MIN, 80, 0, 16)))
Q3_K = _add(QuantType("Q3_K", 11, 256, 110, _L(
    _F(32, 32, 2), 16, _S.SIX_BIT_Q3_K, 108, 96, 12, high=_F(0, 32, 1), offset=4)))
Q4_K = _add(QuantType("Q4_K", 12, 256, 144, _L(_F(16, 32, 4), 32, _S.SIX_BIT_MIN, 0, 4, 12)))
Q5_K = _add(QuantType("Q5_K", 13, 256, 176, _L(_F(48, 32, 4), 32, _S.SIX_BIT_MIN, 0, 4, 12, high=_F(16, 32, 1))))
Q6_K = _add(QuantType("Q6_K", 14, 256, 210, _L(_F(0, 64, 4), 16, _S.I8, 208, 192, 16, high=_F(128, 32, 2), offset=32)))
IQ4_NL = _add(QuantType("IQ4_NL", 20, 32, 18, _L(_F(2, 16, 4), 32, _S.F16, 0, table=IQ4_LEVELS)))
IQ4_XS = _add(QuantType("IQ4_XS", 23, 256, 136, _L(_F(8, 16, 4), 32, _S.SIX_BIT_IQ4_XS, 0, 2, 6, table=IQ4_LEVELS)))
MXFP4 = _add(QuantType("MXFP4", 39, 32, 17, _L(_F(1, 16, 4), 32, _S.E8M0, 0, 0, 1, table=E2M1_LEVELS)))
TQ2_0 = _add(QuantType("TQ2_0", 35, 256, 66, _L(_F(0, 32, 2), 32, _S.F16, 64, offset=1, wide=256)))
TQ1_0 = _add(QuantType("TQ1_0", 34, 256, 54, _L(
    Trits((TritRun(0, 32, 5), TritRun(32, 16, 5), TritRun(48, 4, 4))), 32, _S.F16, 52, offset=1),
    trit_book=TRIT_BOOK))
Q2_0 = _add(QuantType("Q2_0", 42, 64, 18, _L(_F(2, 1, 2), 32, _S.F16, 0, offset=1, wide=64)))
Q1_0 = _add(QuantType("Q1_0", 41, 128, 18, _L(_F(2, 1, 1), 32, _S.F16, 0, table=SIGN_LEVELS, wide=128)))
NVFP4 = _add(QuantType("NVFP4", 40, 64, 36, _L(_F(4, 8, 4), 16, _S.UE4M3, 0, 0, 4, table=E2M1_LEVELS)))
# fmt: on


def _zero(name: str, number: int, columns: int, bits: int, scales: StoredScales) -> QuantType:
    """Groups of Hugging Face folders: s, z, and the group's codes in their order, 8-bit codes less 128; codes of 3 bits
    as the low two bits of all columns, then the high ones."""
    codes = _F(3, columns if bits == 8 else 1, 2 if bits == 3 else bits)
    high = _F(3 + columns // 4, 1, 1) if bits == 3 else None
    wide = columns if columns > 32 else 0
    layout = _L(codes, 32, scales, 0, octets_at=2, octets=1, high=high, wide=wide)
    nbytes = 3 + columns * bits // 8
    return _add(QuantType(name, number, columns, nbytes, layout, in_gguf=False))


_FOUR_AND_EIGHT = ((4, 32), (4, 64), (4, 128), (8, 32), (8, 128))
# By bits, columns of a block and how s is stored. Numbers that neither ggml nor ik_llama.cpp has.
ZERO_TYPES: Mapping[tuple[int, int, StoredScales], QuantType] = MappingProxyType(
    {
        (bits, columns, scales): _zero(f"INT{bits}_G{columns}{suffix}", first + place, columns, bits, scales)
        for first, suffix, scales, sizes in (
            (240, "", _S.F16_ZERO, _FOUR_AND_EIGHT),
            (245, "_BF16", _S.BF16_ZERO, _FOUR_AND_EIGHT),
            (180, "", _S.F16_ZERO, tuple((bits, columns) for bits in (2, 3) for columns in (32, 64, 128))),
        )
        for place, (bits, columns) in enumerate(sizes)
    }
)


def _fp8(columns: int, number: int) -> QuantType:
    layout = _L(_F(4, columns, 8), 32, _S.F32, 0, octets=4, wide=columns, e4m3=True)
    return _add(QuantType(f"FP8_G{columns}", number, columns, 4 + columns, layout, in_gguf=False))


def _scaled_nvfp4(columns: int, number: int) -> QuantType:
    octets = 4 + columns // 16
    layout = _L(_F(octets, 1, 4), 16, _S.UE4M3_F32, 0, octets=octets, table=E2M1_LEVELS)
    name = f"NVFP4_G{columns}"
    return _add(QuantType(name, number, columns, octets + columns // 2, layout, in_gguf=False))


# Of Hugging Face folders too, by columns of a block: 8-bit floats with a float32 for each block, and NVFP4 with one for
# the matrix.
FP8_TYPES: Mapping[int, QuantType] = MappingProxyType(
    {n: _fp8(n, 250 + i) for i, n in enumerate((32, 64, 128))}
)
NVFP4_TYPES: Mapping[int, QuantType] = MappingProxyType(
    {n: _scaled_nvfp4(n, 253 + i) for i, n in enumerate((64, 128, 256))}
)


def _book(name: str, number: int, nbytes: int, book: Codebook) -> QuantType:
    return _add(QuantType(name, number, 256, nbytes, codebook=book))


# fmt: off
# Entries, their columns and largest magnitude; where the indices' low bytes, the groups' words and high bytes are; bits
# of an index in the high bytes; signs; a scale's columns, where scales are, and their bytes.
IQ2_XXS = _book("IQ2_XXS", 16, 66, Codebook(
    256, 8, 43, _R(2, 8), _R(6, 8), None, 0, Signs.PACKED_7, 32, _B.WORD_TOP))
IQ2_XS = _book("IQ2_XS", 17, 74, Codebook(
    512, 8, 43, _R(2, 8, 2), _R(3, 8, 2), None, 1, Signs.HIGH_7, 16, _B.NIBBLES_16, 66, 8))
IQ2_S = _book("IQ2_S", 22, 82, Codebook(
    1024, 8, 43, _R(2, 4), _R(34, 4), _R(66, 1), 2, Signs.BYTES, 16, _B.NIBBLES_16, 74, 8))
IQ3_XXS = _book("IQ3_XXS", 18, 98, Codebook(
    256, 4, 62, _R(2, 8), _R(66, 4), None, 0, Signs.PACKED_7, 32, _B.WORD_TOP, eighths=2))
IQ3_S = _book("IQ3_S", 21, 110, Codebook(
    512, 4, 15, _R(2, 8), _R(74, 4), _R(66, 1), 1, Signs.BYTES, 32, _B.NIBBLES_32, 106, 4, eighths=8))
IQ1_S = _book("IQ1_S", 19, 50, Codebook(
    2048, 8, 8, _R(2, 4), None, _R(34, 2), 3, Signs.DELTA_GROUP, 32, _B.HIGH_TOP_3))
IQ1_M = _book("IQ1_M", 29, 56, Codebook(
    2048, 8, 8, _R(0, 4), None, _R(32, 2), 3, Signs.DELTA_ENTRY, 16, _B.THREES, 48, 8))
# fmt: on
