"""A row of the table of types: a type's GGUF block, described so far that reading, sizes and repacking follow."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from moeserve.quantization.codebook import Codebook

K_BLOCK = 128  # columns of a row that the GPU's planes keep together: a k block
FIELD = 16  # columns: a k block has eight fields
SUPER_BLOCK = 256  # columns: what a d and a dmin are for


class Scale(IntEnum):
    """Names the ways in which a k block's scale words in planes are read; d and dmin are the super-block's."""

    U8_MIN = 0  # word 0: 4 scales, word 1: 4 mins, a byte each. s = d * scale, m = dmin * min
    NIBBLE_MIN = 1  # byte g of the words: scale in the low nibble, min in the high
    I8 = 2  # byte g of the words, signed. s = d * scale
    F16 = 3  # half g of the words. s = half
    F16_MIN = 4  # word g: s in the lower half, -m in the upper
    E8M0 = 5  # byte g of the word: s = 2^(byte - 128)
    UE4M3 = 6  # byte g of the words: s is half of an unsigned float of 4 and 3 bits
    D = 7  # no words: s is the k block's half of the super-block's word
    # Of a k block's four groups four halves s, then a byte z each; or, of one or two, word g: s in the lower half, z in
    # the next byte. m = s * z, or s * (z - 128) where codes have 8 bits
    ZERO = 8
    F32 = 9  # word g: s
    UE4M3_SUPER = 10  # as UE4M3, times a float32 that is the super-block's word


class StoredScales(IntEnum):
    """Names the ways in which a GGUF block stores its groups' scales."""

    F16 = 0  # a float16 s
    F16_MIN = 1  # float16 s, then float16 -m
    E8M0 = 2  # a byte: s = 2^(byte - 128), to go with a doubled code table
    I8 = 3  # float16 d, a signed byte a group
    NIBBLE_MIN = 4  # float16 d and dmin, a byte a group: scale in the low nibble, min in the high
    SIX_BIT_MIN = 5  # float16 d and dmin, 12 bytes: Q4_K's packing of 8 scales and 8 mins
    SIX_BIT_Q3_K = 6  # float16 d, 12 bytes: Q3_K's packing of 16 scales, less 32
    SIX_BIT_IQ4_XS = 7  # float16 d, 6 bytes: IQ4_XS's packing of 8 scales, less 32
    F16_ZERO = 9  # a float16 s and a byte z: m = s * z, or s * (z - 128) where codes have 8 bits
    BF16_ZERO = 10  # the same with a bfloat16 s
    F32 = 11  # a float32 s
    # A float32 that is the same for all of a row, then a byte a group as UE4M3's: s is their product.
    UE4M3_F32 = 12
    UE4M3 = 8  # a byte a group: an unsigned float of 4 and 3 bits, halved, to go with a doubled code table


_PLANE_SCALE = {
    StoredScales.F16: Scale.F16,
    StoredScales.F16_MIN: Scale.F16_MIN,
    StoredScales.E8M0: Scale.E8M0,
    StoredScales.I8: Scale.I8,
    StoredScales.NIBBLE_MIN: Scale.NIBBLE_MIN,
    StoredScales.SIX_BIT_MIN: Scale.U8_MIN,
    StoredScales.SIX_BIT_Q3_K: Scale.I8,
    StoredScales.SIX_BIT_IQ4_XS: Scale.I8,
    StoredScales.UE4M3: Scale.UE4M3,
    StoredScales.F16_ZERO: Scale.ZERO,
    StoredScales.BF16_ZERO: Scale.ZERO,
    StoredScales.F32: Scale.F32,
    StoredScales.UE4M3_F32: Scale.UE4M3_SUPER,
}
# float16 numbers that a block stores for its scales.
_HALVES = {
    StoredScales.F16: 1,
    StoredScales.F16_MIN: 2,
    StoredScales.E8M0: 0,
    StoredScales.I8: 1,
    StoredScales.NIBBLE_MIN: 2,
    StoredScales.SIX_BIT_MIN: 2,
    StoredScales.SIX_BIT_Q3_K: 1,
    StoredScales.SIX_BIT_IQ4_XS: 1,
    StoredScales.UE4M3: 0,
    StoredScales.F16_ZERO: 1,
    StoredScales.BF16_ZERO: 1,
    StoredScales.F32: 0,
    StoredScales.UE4M3_F32: 0,
}
FLOAT32_BYTES = 4  # of StoredScales.F32 and UE4M3_F32, the first of a block's bytes of scales


@dataclass(frozen=True, slots=True)
class CodeTable:
    """The values of codes of 4 bits, or of 1, where a code is not a number itself: signed bytes."""

    levels: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.levels) not in (2, 16) or not all(-128 <= level <= 127 for level in self.levels):
            raise ValueError(f"a code table has 2 or 16 signed bytes, not {self.levels}")


@dataclass(frozen=True, slots=True)
class BitField:
    """Bytes of a block that hold `bits` bits of every code.

    They come in runs of `width` bytes: a run holds the lowest `bits` bits of each byte for `width` columns, then the
    next `bits` bits of each byte for the next `width` columns, and so on.
    """

    at: int  # first byte in the block
    width: int
    bits: int  # 1, 2, 4 or 8

    def nbytes(self, columns: int) -> int:
        return columns * self.bits // 8


@dataclass(frozen=True, slots=True)
class TritRun:
    """Bytes that hold a digit of base 3 of each of some columns' codes: the first digits of `width` columns, then the
    second digits of the next `width`, ..."""

    at: int  # first byte in the block
    width: int  # bytes
    digits: int  # of a byte: 4 or 5


@dataclass(frozen=True, slots=True)
class Trits:
    """Codes 0, 1 and 2, five to a byte.

    A byte is ceil(n * 256 / 243), where n is the number formed by its five digits, most significant first (with four
    digits, the fifth is 0). So the first digit is the third of 0..255 in which the byte lies, and the next digit is the
    same for 3 * byte modulo 256.
    """

    runs: tuple[TritRun, ...]

    bits = 2  # what a code needs by itself


# One object a type, known by its identity: kernel launches hash it.
@dataclass(frozen=True, slots=True, eq=False)
class BlockLayout:
    """Says where a quantised type's block has its codes and scales. A weight is s * (code - offset) - m, with the
    scale s and the min m of its group; `codes` of 8 bits and codes of a table are signed."""

    low: BitField | Trits  # the codes' low bits: 1, 2, 4 or 8
    group: int  # columns that share a scale: 16 or 32
    stored_scales: StoredScales
    halves_at: int  # byte of the float16 s or d, which the min's follows at once
    octets_at: int = 0  # first of the bytes of scales, where there are any
    octets: int = 0  # how many
    high: BitField | None = None  # the codes' bits above: 1 or 2
    offset: int = 0
    table: CodeTable | None = None
    wide: int = 0  # columns of a block whose groups all share its scale
    # Codes are floats: a sign, 4 bits of exponent (bias 7), 3 of mantissa; 127 is 480, not NaN.
    e4m3: bool = False

    @property
    def low_bits(self) -> int:
        return self.low.bits

    @property
    def high_bits(self) -> int:
        return 0 if self.high is None else self.high.bits

    @property
    def halves(self) -> int:
        """float16 numbers of a block."""
        return _HALVES[self.stored_scales]

    @property
    def has_zero(self) -> bool:
        """m is a multiple of s, by a byte of each group."""
        return self.stored_scales in (StoredScales.F16_ZERO, StoredScales.BF16_ZERO)

    @property
    def is_signed(self) -> bool:
        """Codes are signed bytes."""
        return self.low_bits == 8 or self.table is not None

    @property
    def has_super(self) -> bool:
        """Groups' scales are multiples of the super-block's d."""
        return self.scale in (Scale.U8_MIN, Scale.NIBBLE_MIN, Scale.I8, Scale.D, Scale.UE4M3_SUPER)

    @property
    def has_own_min(self) -> bool:
        """m is not a multiple of s."""
        return self.scale in (Scale.U8_MIN, Scale.NIBBLE_MIN, Scale.F16_MIN, Scale.ZERO)

    @property
    def has_min(self) -> bool:
        """m is not 0: a min of its own, or the offset's."""
        return self.offset != 0 or self.has_own_min

    # ---------------------------------------------------------------- in the GPU's planes

    is_book = False

    @property
    def parts(self) -> int:
        return self.low_parts + self.high_parts

    def row_words(self, k_blocks: int) -> int:
        """32-bit scale words of a row."""
        return k_blocks * self.words

    @property
    def scale_group(self) -> int:
        """Columns that share a scale: 16, 32, 64 or 128."""
        return min(max(self.wide, self.group), K_BLOCK)

    @property
    def scale(self) -> Scale:
        if self.stored_scales == StoredScales.F16 and self.wide >= K_BLOCK:
            return Scale.D
        return _PLANE_SCALE[self.stored_scales]

    @property
    def low_parts(self) -> int:
        return self.low_bits

    @property
    def high_parts(self) -> int:
        return self.high_bits

    @property
    def has_min_word(self) -> bool:
        """Word 0 of a k block holds the scales, word 1 the mins."""
        return self.scale == Scale.U8_MIN

    @property
    def groups_per_word(self) -> int:
        by_form = {Scale.F16: 2, Scale.F16_MIN: 1, Scale.F32: 1, Scale.ZERO: 1 if self.wide else 2}
        return by_form.get(self.scale, 4)

    @property
    def slices_k(self) -> bool:
        """sliced_k_gemm.py reads such scales."""
        return self.scale not in (Scale.D, Scale.ZERO, Scale.UE4M3_SUPER) and not self.wide

    @property
    def has_bfloat16(self) -> bool:
        return self.stored_scales == StoredScales.BF16_ZERO

    @property
    def words(self) -> int:
        """32-bit scale words of a k block."""
        if self.scale == Scale.D:
            return 0
        groups = K_BLOCK // self.scale_group
        zeros = 1 if self.scale == Scale.ZERO and not self.wide else 0
        return groups // self.groups_per_word * (2 if self.has_min_word else 1) + zeros

    @property
    def bias(self) -> float:
        """A kernel's floats of codes are (code + bias) * unit: bit patterns that need no conversion."""
        return 32896.0 if self.is_signed else 128.0

    @property
    def unit(self) -> float:
        return 1.0 if self.is_signed else 1.0 / 128


@dataclass(frozen=True, slots=True, eq=False)
class QuantType:
    """A type of tensors. int() gives ggml's number, which operators and the C++ engine take."""

    name: str  # ggml's
    number: int  # ggml's
    block_columns: int  # values in a block; a row's columns are a multiple of it
    block_bytes: int
    layout: BlockLayout | None = None  # of a quantised type whose codes are numbers, or indices of 16 levels
    codebook: Codebook | None = None  # of a quantised type whose codes are indices into a codebook
    float_name: str = ""  # of a float type: numpy's and torch's name of it
    in_gguf: bool = True  # False: of Hugging Face folders only, with a number of our own
    # How a GPU's planes hold a type of base-3 digits: eight columns are an index into `ternary_entries`, in 13 bits.
    trit_book: Codebook | None = None
    cpu: bool = True  # whether the C++ engine has kernels for it
    gpu: bool = True  # whether a GPU's planes have a form for it

    def __post_init__(self) -> None:
        forms = [self.layout is not None, self.codebook is not None, bool(self.float_name)]
        if sum(forms) != 1:
            raise ValueError(f"{self.name}: a type has a layout, a codebook or, a float, a name")
        if self.layout is not None:
            _check(self, self.layout)

    def __int__(self) -> int:
        return self.number

    @property
    def is_quantised(self) -> bool:
        return not self.float_name

    @property
    def plane_book(self) -> Codebook | None:
        """Returns the codebook by which a GPU's planes hold the type; None: as codes or floats."""
        return self.trit_book or self.codebook

    @property
    def planes_form(self) -> BlockLayout | Codebook | None:
        """Returns the layout or codebook by which a GPU's planes hold the type; None: as floats."""
        return self.plane_book or self.layout

    def row_bytes(self, columns: int) -> int:
        """Bytes of a GGUF row of `columns` values, a multiple of block_columns."""
        return columns // self.block_columns * self.block_bytes

    def plane_row_bytes(self, columns: int) -> int:
        """Bytes of a matrix row in the GPU's planes: whole k blocks, plus each super-block's d and dmin."""
        form = self.planes_form
        if form is None:
            return self.row_bytes(columns)
        k_blocks = -(-columns // K_BLOCK)
        supers = 4 * -(-columns // SUPER_BLOCK) if form.has_super else 0
        return k_blocks * form.parts * FIELD + 4 * form.row_words(k_blocks) + supers


def _check(row: QuantType, layout: BlockLayout) -> None:
    """Raises ValueError for a block whose parts do not fill it, or of a form that no kernel reads."""
    parts = [(layout.halves_at, 2 * layout.halves), (layout.octets_at, layout.octets)]
    fields = [f for f in (layout.low, layout.high) if isinstance(f, BitField)]
    parts += [(f.at, f.nbytes(row.block_columns)) for f in fields]
    if isinstance(layout.low, Trits):
        parts += [(run.at, run.width) for run in layout.low.runs]
        digits = sum(run.width * run.digits for run in layout.low.runs)
        if digits != row.block_columns:
            raise ValueError(f"{row.name}: {digits} digits for {row.block_columns} columns")
    end = 0
    for at, nbytes in sorted(part for part in parts if part[1]):
        if at != end:
            raise ValueError(
                f"{row.name}: a part of the block begins at byte {at}, the one before ends at {end}; correct the "
                "row's offsets"
            )
        end = at + nbytes
    if end != row.block_bytes:
        raise ValueError(
            f"{row.name}: the parts of a block take {end} bytes of {row.block_bytes}; correct the row's sizes"
        )
    whole = SUPER_BLOCK if layout.has_super else layout.group * (layout.octets or 1)
    columns = layout.wide or whole
    if layout.stored_scales == StoredScales.UE4M3_F32:  # the same for all of a row
        columns = layout.group * (layout.octets - FLOAT32_BYTES)
    has_fields = row.gpu and row.trit_book is None
    if has_fields and row.block_columns != columns:
        raise ValueError(
            f"{row.name}: a block has {row.block_columns} columns, and scales for {columns}; correct the row"
        )
    widths = (1, 2, 4, 8) if layout.wide or not has_fields else (2, 4, 8)
    if layout.group not in (16, 32) or layout.low_bits not in widths or layout.high_bits not in (0, 1, 2):
        raise ValueError(f"{row.name}: no kernel reads such groups or codes")
    if layout.low_bits + layout.high_bits > 8:
        raise ValueError(f"{row.name}: codes of more than 8 bits")
    if layout.table is not None and len(layout.table.levels) != 1 << layout.low_bits:
        raise ValueError(
            f"{row.name}: a table of {len(layout.table.levels)} levels for codes of {layout.low_bits} "
            "bits; correct the row"
        )
    if has_fields and isinstance(layout.low, Trits):
        raise ValueError(f"{row.name}: the GPU's planes hold digits of base 3 by a trit_book only")
