"""Tensors that a checkpoint stores in another form than GGUF; converted when they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moeserve.models.errors import ModelError, SettingError
from moeserve.models.sources.row_places import RowPlaces
from moeserve.quantization import QuantType
from moeserve.quantization.reference import dequantize
from moeserve.quantization.table import BF16, F16, F32

from .fp8_blocks import bfloat16_bits, dequantized
from .safetensors_file import StoredTensor, stored_numbers

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_ROWS_AT_ONCE = 1024  # of a matrix that is computed in blocks


@dataclass(frozen=True, slots=True)
class MadeTensor:
    """A tensor that is converted to GGUF's form when it is read. shape and type are those of the result; sources: the
    stored tensors that it is made from; make: returns its bytes."""

    shape: tuple[int, ...]
    type: QuantType
    sources: tuple[StoredTensor, ...]
    make: Callable[[], Bytes]
    order: npt.NDArray[np.int32] | None = None  # as PackedWeight.order
    # Reads only these rows of a table, uint8 [n, bytes of a row]. None: rows are taken from the result of `make`.
    take: Callable[[npt.NDArray[np.int64]], Bytes] | None = None
    places: Callable[[], RowPlaces] | None = None  # returns where `take` finds the rows; None: nowhere


def floats_made(
    source: StoredTensor,
    shape: tuple[int, ...],
    compute: Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]],
) -> MadeTensor:
    """Returns a float32 tensor of this shape, computed from another's values."""
    source.float_type  # noqa: B018  (raises ModelError for a tensor that is not of floats)
    return MadeTensor(shape, F32, (source,), lambda: bytes_of(compute(_floats(source)).reshape(shape)))


def product_made(first: StoredTensor, second: StoredTensor) -> MadeTensor:
    """Returns the float32 product, number by number, of two tensors with as many numbers; of the first one's shape."""
    for each in (first, second):
        each.float_type  # noqa: B018  (raises ModelError for a tensor that is not of floats)

    def make() -> Bytes:
        return bytes_of(_floats(first).reshape(-1) * _floats(second).reshape(-1))

    return MadeTensor(first.shape, F32, (first, second), make)


def rows_made(
    source: StoredTensor, shape: tuple[int, ...], choose: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
) -> MadeTensor:
    """Returns a tensor of the same type whose rows are those that `choose` selects. choose: takes and returns an array
    [..., rows, bytes or numbers of a row] and must not depend on a row's length."""
    packed = source.packed
    if packed is None:
        return values_made(source, shape, choose)
    return MadeTensor(shape, packed.type, (source,), lambda: bytes_of(choose(packed.make())), packed.order)


def rows_joined(
    sources: tuple[StoredTensor, ...],
    shape: tuple[int, ...],
    choose: Callable[[npt.NDArray[Any]], npt.NDArray[Any]],
) -> MadeTensor:
    """Returns a tensor of the rows that `choose` selects of each source; all have the first one's type. choose: as
    `rows_made`'s."""

    def rows_of(source: StoredTensor) -> npt.NDArray[Any]:
        return choose(numbers_of(source) if source.packed is None else source.packed.make())

    return MadeTensor(
        shape, sources[0].type, sources, lambda: bytes_of(np.concatenate([rows_of(one) for one in sources]))
    )


def values_made(
    source: StoredTensor, shape: tuple[int, ...], choose: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
) -> MadeTensor:
    """Returns a tensor whose single values are selected by `choose`; integers with scales become float32."""
    return MadeTensor(shape, source.float_type, (source,), lambda: bytes_of(choose(numbers_of(source))))


def scaled_rows(path: Path, source: StoredTensor, factors: npt.NDArray[np.float32]) -> MadeTensor:
    """Returns a matrix of the same type with each row multiplied by a factor in float32, rounded to that type. factors:
    [rows, 1], or [1, 1] for all rows. Reading it raises ModelError if float16 cannot hold a product."""
    kind = source.float_type

    def make() -> Bytes:
        with np.errstate(over="ignore"):
            numbers = _as_numbers(_floats(source) * factors, kind)
        if kind is F16 and np.isinf(numbers.view(np.float16)).any():
            raise ModelError(
                path,
                f"tensor {source.name!r} times its multiplier exceeds float16's range; convert the folder to bfloat16",
            )
        return bytes_of(numbers)

    return MadeTensor(source.shape, kind, (source,), make)


def unit_columns(source: StoredTensor, epsilon: float) -> MadeTensor:
    """Returns a matrix of the same type with each column divided by its length plus `epsilon` in float32, rounded to
    that type. It is computed in blocks of rows: a large head would take several times its bytes in float32."""
    kind = source.float_type

    def make() -> Bytes:
        numbers = numbers_of(source)
        blocks = [slice(row, row + _ROWS_AT_ONCE) for row in range(0, len(numbers), _ROWS_AT_ONCE)]
        squares = np.zeros(numbers.shape[1])
        for rows in blocks:
            squares += np.square(_as_floats(numbers[rows], kind)).sum(0, dtype=np.float64)
        lengths = (np.sqrt(squares) + epsilon).astype(np.float32)
        made = np.empty_like(numbers)
        for rows in blocks:
            made[rows] = _as_numbers(_as_floats(numbers[rows], kind) / lengths, kind)
        return bytes_of(made)

    return MadeTensor(source.shape, kind, (source,), make)


def find_tensor(path: Path, stored: dict[str, StoredTensor], name: str, dimensions: int) -> StoredTensor:
    """Returns a stored tensor. Raises ModelError if it is missing or has another number of dimensions than
    `dimensions`."""
    tensor = stored.get(name)
    if tensor is None:
        raise ModelError(path, f"tensor {name!r} is missing; download the whole repository")
    if len(tensor.shape) != dimensions:
        raise SettingError(
            path, f"tensor {name!r} has shape {list(tensor.shape)}; {dimensions} dimensions are expected"
        )
    return tensor


def find_part(
    path: Path, stored: dict[str, StoredTensor], name: str, dtypes: tuple[str, ...], dimensions: int = 2
) -> StoredTensor:
    """Returns the stored tensor of this name. Raises ModelError if it is missing, empty, or of none of these dtypes."""
    tensor = find_tensor(path, stored, name, dimensions)
    if tensor.dtype not in dtypes or 0 in tensor.shape:
        raise SettingError(
            path, f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)}; {' or '.join(dtypes)} is expected"
        )
    return tensor


def misfit(path: Path, prefix: str) -> ModelError:
    """Makes the error for parts of a matrix that contradict one another."""
    return SettingError(path, f"the parts of {prefix!r} have shapes that do not fit one another")


def numbers_of(tensor: StoredTensor) -> npt.NDArray[Any]:
    """Returns the tensor's numbers as unsigned integers of the same width, for moving values without computing. A
    quantised tensor is dequantised first: 8-bit floats to bfloat16, scaled integers to float32."""
    if tensor.scales is not None:
        return dequantized(tensor)
    if tensor.packed is not None:
        values = dequantize(tensor.packed.type, tensor.packed.make()).reshape(tensor.shape)
        if tensor.packed.order is not None:
            values = values[:, np.argsort(tensor.packed.order)]
        return values.view(np.uint32)
    return stored_numbers(tensor)


def is_zero_bias(tensor: StoredTensor) -> bool:
    """Returns whether the tensor is a bias (F16, BF16 or F32, one dimension) of zeros, which some quantisers write for
    layers without a bias."""
    is_bias = tensor.name.endswith(".bias") and len(tensor.shape) == 1
    return is_bias and tensor.dtype in ("F16", "BF16", "F32") and not stored_numbers(tensor).any()


def bytes_of(numbers: npt.NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(numbers).reshape(-1).view(np.uint8)


def _floats(tensor: StoredTensor) -> npt.NDArray[np.float32]:
    return _as_floats(numbers_of(tensor), tensor.float_type)


def _as_floats(numbers: npt.NDArray[Any], kind: QuantType) -> npt.NDArray[np.float32]:
    """Returns the values of `numbers_of` a tensor of type F32, BF16 or F16."""
    if kind is F32:
        return numbers.view(np.float32)
    if kind is BF16:
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.view(np.float16).astype(np.float32)


def _as_numbers(values: npt.NDArray[np.float32], kind: QuantType) -> npt.NDArray[Any]:
    """Does the reverse of `_as_floats`, rounding to nearest."""
    if kind is F32:
        return values.view(np.uint32)
    return bfloat16_bits(values) if kind is BF16 else values.astype(np.float16).view(np.uint16)
