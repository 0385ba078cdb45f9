"""Types whose codes are indices into a codebook: where a block has its indices, signs and scales.

A block has 256 columns in groups of 32. A weight is d * (2 n + 1) * eighths / 8 * v: n is the scale of its 16 or 32
columns, v is an entry's magnitude with a sign or, where a delta is added, 8 * entry + 1 or - 1.
Source: ggml's IQ types as gguf-py dequantises them (`gguf.quants`), which also has the entries, so that no copy of them
lies here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np  # at run time each function imports it: the launcher reads the types' sizes without it

GROUP = 32  # columns that share a word and high bytes


class Signs(IntEnum):
    """Names the ways in which entries get their signs, eight columns at a time."""

    # Seven bits of the group's word for each 8 columns; the eighth makes the number of minuses even.
    PACKED_7 = 0
    HIGH_7 = 1  # byte e of the word above its lowest bit, which is the index's ninth; the eighth as above
    BYTES = 2  # byte e of the word
    DELTA_GROUP = 3  # none: 1/8 is added to all columns, or subtracted where bit 15 of the high bytes is set
    DELTA_ENTRY = 4  # none: the same by entry, where bit 3 of its nibble of the high bytes is set
    INCLUDED = 5  # none: entries are signed; bit e of a k block's scale bytes is the index's highest


class BookScales(IntEnum):
    """Names the places where a block stores the integers n of its scales."""

    WORD_TOP = 0  # the word's highest 4 bits, for 32 columns
    NIBBLES_32 = 1  # nibbles of the octets, for 32 columns
    NIBBLES_16 = 2  # nibbles of the octets, for 16 columns
    HIGH_TOP_3 = 3  # bits 12 to 14 of the high bytes, for 32 columns
    THREES = 4  # 3 bits for 16 columns, four to a 16-bit word of the octets, whose highest 4 bits are d's
    NONE = 5  # n is 0


@dataclass(frozen=True, slots=True)
class ByteRun:
    """Bytes of a block that belong to entries: a group's first at `at` + group's number * `group`, the next ones `step`
    apart."""

    at: int
    group: int
    step: int = 1

    def of(
        self, blocks: np.ndarray[Any, np.dtype[np.uint8]], count: int
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Returns `count` bytes of each group: uint8 [blocks, 8, count]."""
        import numpy as np

        at = self.at + self.group * np.arange(256 // GROUP)[:, None] + self.step * np.arange(count)
        return blocks[:, at]


# One object a type, known by its identity.
@dataclass(frozen=True, slots=True, eq=False)
class Codebook:
    """The codebook of a type (of one row of the table): its entries, and where a block stores their indices,
    signs and scales."""

    entries: int
    columns: int  # of an entry: 4 or 8
    most: int  # the largest magnitude of an entry, or of 8 times an entry where a delta is added
    low: ByteRun  # the indices' low bytes
    word: ByteRun | None  # four bytes for a group
    high: ByteRun | None  # bytes with the indices' high bits
    high_bits: int
    signs: Signs
    group: int  # columns that share a scale: 16 or 32
    scales: BookScales
    octets_at: int = 0  # first of the bytes of scales, where there are any
    octets: int = 0
    eighths: int = 1

    is_book = True  # a kernel's form of planes: this, or a BlockLayout

    @property
    def has_delta(self) -> bool:
        return self.signs in (Signs.DELTA_GROUP, Signs.DELTA_ENTRY)

    @property
    def has_d(self) -> bool:
        """A float16 d is in the block's first bytes; else it is spread over the scales' words."""
        return self.scales != BookScales.THREES

    # ---------------------------------------------------------------- in the GPU's planes

    has_super = False  # of `supers` the planes have no rows: there is the codebook

    @property
    def low_parts(self) -> int:
        """Bytes of indices for eight columns."""
        return 8 // self.columns

    @property
    def parts(self) -> int:
        return self.low_parts + (0 if self.word is None else 1)

    @property
    def high_words(self) -> int:
        """32-bit words of a k block's four groups' high bytes."""
        return 0 if self.high is None else self.high.group

    @property
    def words(self) -> int:
        """32-bit scale words of a k block: the high bytes, then the bytes of scales."""
        return self.high_words + (1 if self.octets else 0)

    @property
    def has_tail(self) -> bool:
        """True if a row's words end with a word for each d; False if each d shares a word with scales."""
        return self.has_d and self.scales not in (BookScales.NIBBLES_32, BookScales.NONE)

    def row_words(self, k_blocks: int) -> int:
        """32-bit scale words of a row, whose columns are a multiple of 256."""
        return k_blocks * self.words + (k_blocks // 2 if self.has_tail else 0)


@cache
def ternary_entries() -> np.ndarray[Any, np.dtype[np.int8]]:
    """Returns all vectors of eight columns of -1, 0 and 1, the last column changing fastest: int8 [6561, 8]."""
    import numpy as np

    digits = np.arange(3**8)[:, None] // 3 ** np.arange(7, -1, -1) % 3
    return (digits - 1).astype(np.int8)


@cache
def entries_of(name: str) -> np.ndarray[Any, np.dtype[np.int8]]:
    """Returns gguf-py's codebook of the type with ggml's `name`: int8 [entries, columns]."""
    import gguf.quants  # slow to import, and only for a model with such a type
    import numpy as np

    kind = getattr(gguf.quants, name)
    kind.init_grid()
    return np.ascontiguousarray(kind.grid.reshape(kind.grid_shape).astype(np.int8))
