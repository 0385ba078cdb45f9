"""One row per tensor type: what its codes and scales look like in planes. `__init__.py` has the layout."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

UNIT = 128  # columns
FIELD = 16  # columns
SUPER = 256  # columns: a K-quant's super-block
QUANT_GROUP = 32  # columns that share a scale of int8 activations


class GgmlType(IntEnum):
    """ggml's numbers of the types that have kernels, the same as `moeserve.models.gguf.quant_types` serves."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
    IQ4_XS = 23
    BF16 = 30
    MXFP4 = 39


class Scale(IntEnum):
    """How a unit's scale words are read; d and dmin are the super-block's."""

    U8_MIN = 0  # word 0: 4 scales, word 1: 4 mins, a byte each. s = d * scale, m = dmin * min
    NIBBLE_MIN = 1  # byte g of the words: scale in the low nibble, min in the high
    I8 = 2  # byte g of the words, signed. s = d * scale
    F16 = 3  # half g of the words. s = half
    F16_MIN = 4  # word g: s in the lower half, -m in the upper
    E8M0 = 5  # byte g of the word: s = 2^(byte - 128)


class Table(IntEnum):
    """What a code stands for, where it is not a number itself."""

    NONE = 0
    IQ4 = 1
    E2M1 = 2  # doubled; Scale.E8M0 is halved in turn


LEVELS = {
    Table.IQ4: (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    Table.E2M1: (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
}


@dataclass(frozen=True, slots=True, eq=False)  # one object a type, known by its identity: launches hash it
class Format:
    """A quantised type. A unit has 128 / group groups, each with a scale."""

    block: int  # columns of a GGUF block
    block_bytes: int
    low_bits: int  # of the low parts: 2, 4 or 8
    high_bits: int  # of the high parts: 0, 1 or 2
    group: int  # columns that share a scale: 16 or 32
    scale: Scale
    offset: int = 0  # subtracted from every code
    table: Table = Table.NONE

    @property
    def low_parts(self) -> int:
        return self.low_bits

    @property
    def high_parts(self) -> int:
        return self.high_bits

    @property
    def words(self) -> int:
        """32-bit scale words of a unit."""
        groups = UNIT // self.group
        if self.scale == Scale.U8_MIN:
            return 2 * groups // 4
        return {Scale.F16: groups // 2, Scale.F16_MIN: groups}.get(self.scale, groups // 4)

    @property
    def is_signed(self) -> bool:
        """Codes are signed bytes."""
        return self.low_bits == 8 or self.table != Table.NONE

    @property
    def bias(self) -> float:
        """A kernel's floats of codes are (code + bias) * unit: bit patterns that need no conversion."""
        return 32896.0 if self.is_signed else 128.0

    @property
    def unit(self) -> float:
        return 1.0 if self.is_signed else 1.0 / 128

    @property
    def has_min(self) -> bool:
        """m is not 0: a min of its own, or the offset's."""
        return self.offset != 0 or self.has_own_min

    @property
    def has_own_min(self) -> bool:
        """m is not a multiple of s."""
        return self.scale in (Scale.U8_MIN, Scale.NIBBLE_MIN, Scale.F16_MIN)

    @property
    def has_min_word(self) -> bool:
        """Word 0 of a unit holds the scales, word 1 the mins."""
        return self.scale == Scale.U8_MIN

    @property
    def groups_per_word(self) -> int:
        return {Scale.F16: 2, Scale.F16_MIN: 1}.get(self.scale, 4)

    @property
    def has_super(self) -> bool:
        return self.scale in (Scale.U8_MIN, Scale.NIBBLE_MIN, Scale.I8)


FORMATS: dict[GgmlType, Format] = {
    GgmlType.Q4_0: Format(32, 18, 4, 0, 32, Scale.F16, offset=8),
    GgmlType.Q4_1: Format(32, 20, 4, 0, 32, Scale.F16_MIN),
    GgmlType.Q5_0: Format(32, 22, 4, 1, 32, Scale.F16, offset=16),
    GgmlType.Q5_1: Format(32, 24, 4, 1, 32, Scale.F16_MIN),
    GgmlType.Q8_0: Format(32, 34, 8, 0, 32, Scale.F16),
    GgmlType.Q2_K: Format(256, 84, 2, 0, 16, Scale.NIBBLE_MIN),
    GgmlType.Q3_K: Format(256, 110, 2, 1, 16, Scale.I8, offset=4),
    GgmlType.Q4_K: Format(256, 144, 4, 0, 32, Scale.U8_MIN),
    GgmlType.Q5_K: Format(256, 176, 4, 1, 32, Scale.U8_MIN),
    GgmlType.Q6_K: Format(256, 210, 4, 2, 16, Scale.I8, offset=32),
    GgmlType.IQ4_NL: Format(32, 18, 4, 0, 32, Scale.F16, table=Table.IQ4),
    GgmlType.IQ4_XS: Format(256, 136, 4, 0, 32, Scale.I8, table=Table.IQ4),
    GgmlType.MXFP4: Format(32, 17, 4, 0, 32, Scale.E8M0, table=Table.E2M1),
}
FLOATS: dict[GgmlType, torch.dtype] = {
    GgmlType.F32: torch.float32,
    GgmlType.F16: torch.float16,
    GgmlType.BF16: torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class Planes:
    """A matrix [rows, cols] or a stack of `experts` of them, on one device."""

    type: GgmlType
    experts: int
    rows: int
    cols: int
    codes: Tensor  # uint8 [experts, rows, parts, units, 16], or floats [experts, rows, cols]
    scales: Tensor  # int32 [experts, rows, units, words]; empty for floats
    supers: Tensor  # int32 [experts, rows, super-blocks]; empty where the type has none

    @property
    def quantised(self) -> bool:
        return self.type in FORMATS

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + self.supers.nbytes


def units_of(cols: int) -> int:
    return -(-cols // UNIT)


def supers_of(cols: int) -> int:
    return -(-cols // SUPER)
