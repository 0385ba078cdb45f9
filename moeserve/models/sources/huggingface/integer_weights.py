"""Matrices of 2 to 8 bits as GPTQ, AWQ and compressed-tensors store them, in 32-bit words, lowest bits first.

    GPTQ (https://arxiv.org/abs/2210.17323)
        qweight [in * bits / 32, out]     a word holds consecutive inputs of a column; codes of 3 bits cross words
        qzeros [groups, out * bits / 32]  the zero points less 1; in GPTQ's second format the zero points themselves
        scales [groups, out]
        g_idx [in]                        the group of each input; with act-order in any order (column_order.py)
    AWQ (https://arxiv.org/abs/2306.00978)
        qweight [in, out / 8]             a word holds eight outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7
        qzeros [groups, out / 8]          likewise
        scales [groups, out]
    compressed-tensors
        weight_packed [out, in * bits / 32], or `weight` [out, in] of signed bytes
        weight_scale [out, groups]
        weight_zero_point [out * bits / 32, groups]  a word holds consecutive outputs; absent: the middle of the codes
        weight_shape                      the matrix's shape

Bits and groups follow from the shapes, as settings may differ from module to module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .bit_stream import unpacked_bits
from .column_order import column_order, columns_of, in_order
from .down_order import move_orders_into_rows
from .fp4_weights import modelopt_matrix, packed_fp4_matrix
from .made_tensor import find_part, misfit
from .quantization_config import AWQ, GPTQ, is_gptq_v2
from .safetensors_file import StoredTensor, stored_numbers
from .zero_blocks import Bytes, Integers, are_float16, integer_matrix

WORD = 32
Stored = dict[str, StoredTensor]
# Settings for quantising activations and the KV cache, which are ignored here.
_OF_ACTIVATIONS = (
    *("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point"),
    *("k_scale", "v_scale", "q_scale", "activation_scale"),
    *("gate_up_proj_activation_scale", "down_proj_activation_scale"),
)


def with_packed(path: Path, stored: Stored, settings: dict[str, Any]) -> Stored:
    """Returns the tensors, with matrices of integers or of 4-bit floats (fp4_weights.py) in place of their parts, under
    their names in a float checkpoint. Raises ModelError for inconsistent parts, and for formats that no block type can
    hold."""
    found = {name: t for name, t in stored.items() if name.rpartition(".")[2] not in _OF_ACTIVATIONS}
    method = settings["quant_method"]
    centered = [t for t in map(functools.partial(_centered_scales, stored), stored) if t is not None]
    # Of all at once: a layer's experts become one matrix, which has one type.
    are_halves = functools.cache(lambda: all(map(are_float16, centered)))
    for name in list(found):
        prefix, _, part = name.rpartition(".")
        if part == "qweight" and method in (GPTQ, AWQ):
            matrix = (
                _gptq(path, found, prefix, is_gptq_v2(settings))
                if method == GPTQ
                else _awq(path, found, prefix)
            )
        elif part == "weight_packed" and found[name].dtype == "U8":
            matrix = packed_fp4_matrix(path, found, prefix)
        elif part == "weight_packed":
            matrix = _packed(path, found, prefix, are_halves)
        elif part == "weight" and found[name].dtype == "U8":
            matrix = modelopt_matrix(path, found, prefix)
        elif part == "weight" and found[name].dtype == "I8" and found[name].packed is None:
            matrix = _signed_bytes(path, found, prefix, are_halves)
        else:
            continue
        assert matrix.packed is not None
        for source in matrix.packed.sources:
            del found[source.name]
        found[matrix.name] = matrix
    move_orders_into_rows(path, found)
    return found


_FLOAT = ("F16", "BF16", "F32")


def _centered_scales(stored: Stored, name: str) -> StoredTensor | None:
    """Returns the scales of a matrix's codes if they are bfloat16 and codes have no zero points; None for other
    tensors than such codes."""
    prefix, _, part = name.rpartition(".")
    scales = stored.get(f"{prefix}.weight_scale")
    if part not in ("weight_packed", "weight") or stored[name].dtype not in ("I32", "I8") or scales is None:
        return None
    return scales if scales.dtype == "BF16" and f"{prefix}.weight_zero_point" not in stored else None


def _gptq(path: Path, stored: Stored, prefix: str, is_v2: bool) -> StoredTensor:
    weight, zeros = (find_part(path, stored, f"{prefix}.{part}", ("I32",)) for part in ("qweight", "qzeros"))
    scales = find_part(path, stored, f"{prefix}.scales", _FLOAT)
    groups, out = scales.shape
    bits = zeros.shape[1] * WORD // out
    if bits * out != zeros.shape[1] * WORD or zeros.shape[0] != groups or weight.shape[1] != out or bits < 1:
        raise misfit(path, prefix)
    cols = weight.shape[0] * WORD // bits
    sources = [weight, zeros, scales]
    order = None
    if f"{prefix}.g_idx" in stored:
        sources.append(columns_of(path, stored, f"{prefix}.g_idx", cols))
        order = column_order(path, sources[-1], groups)

    def points() -> Bytes:
        if is_v2:
            return _codes(stored_numbers(zeros), bits)
        if WORD % bits:
            return _codes(stored_numbers(zeros), bits) + np.uint8(1) & np.uint8((1 << bits) - 1)
        # On whole words, as it was subtracted.
        one = sum(1 << shift for shift in range(0, WORD, bits))
        return _codes(stored_numbers(zeros) + np.uint32(one), bits)

    def read() -> Integers:
        words = np.ascontiguousarray(stored_numbers(weight).T)
        codes = in_order(words.view(np.uint8), order, bits)
        return Integers(codes, stored_numbers(scales).T, points().T)

    return integer_matrix(
        weight, f"{prefix}.weight", (out, cols), bits, scales, groups, tuple(sources), read, order
    )


# A word's nibbles, lowest first, belong to these of its eight outputs.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _awq(path: Path, stored: Stored, prefix: str) -> StoredTensor:
    weight, zeros = (find_part(path, stored, f"{prefix}.{part}", ("I32",)) for part in ("qweight", "qzeros"))
    scales = find_part(path, stored, f"{prefix}.scales", _FLOAT)
    (cols, words), (groups, out) = weight.shape, scales.shape
    if words * 8 != out or zeros.shape != (groups, words):
        raise misfit(path, prefix)

    def outputs(tensor: StoredTensor) -> Bytes:
        # Transposed as words, which are fewer than codes.
        turned = np.ascontiguousarray(stored_numbers(tensor).T)
        spread = np.empty((words, 8, turned.shape[1]), np.uint8)
        for nibble, place in enumerate(_AWQ_ORDER):
            spread[:, place] = turned >> np.uint32(4 * nibble) & np.uint32(15)
        return spread.reshape(out, -1)

    def read() -> Integers:
        codes = outputs(weight)
        packed = codes[:, ::2] | codes[:, 1::2] << np.uint8(4)
        return Integers(packed, stored_numbers(scales).T, outputs(zeros))

    sources = (weight, zeros, scales)
    return integer_matrix(weight, f"{prefix}.weight", (out, cols), 4, scales, groups, sources, read)


def _packed(path: Path, stored: Stored, prefix: str, are_halves: Callable[[], bool]) -> StoredTensor:
    weight = find_part(path, stored, f"{prefix}.weight_packed", ("I32",))
    scales = find_part(path, stored, f"{prefix}.weight_scale", _FLOAT)
    shape = find_part(path, stored, f"{prefix}.weight_shape", ("I64", "I32"), 1)
    if shape.shape != (2,):
        raise misfit(path, prefix)
    rows, cols = (int(size) for size in stored_numbers(shape))
    bits = weight.shape[1] * WORD // max(1, cols)
    groups = scales.shape[1]
    if weight.shape != (rows, cols * bits // WORD) or cols * bits % WORD or scales.shape[0] != rows:
        raise misfit(path, prefix)
    sources = [weight, scales, shape]
    order = None
    if f"{prefix}.weight_g_idx" in stored:
        sources.append(columns_of(path, stored, f"{prefix}.weight_g_idx", cols))
        order = column_order(path, sources[-1], groups)
    zeros = None
    if f"{prefix}.weight_zero_point" in stored:
        zeros = find_part(path, stored, f"{prefix}.weight_zero_point", ("I32",))
        if zeros.shape != (-(-rows * bits // WORD), groups):
            raise misfit(path, prefix)
        sources.append(zeros)

    def points() -> Bytes:
        if zeros is None:
            return np.full((rows, groups), 1 << bits - 1, np.uint8)
        return np.ascontiguousarray(_codes(stored_numbers(zeros).T, bits).T[:rows])

    def read() -> Integers:
        codes = np.ascontiguousarray(stored_numbers(weight)).view(np.uint8)
        return Integers(in_order(codes, order, bits), stored_numbers(scales), points())

    kept = tuple(sources)
    return integer_matrix(
        *(weight, f"{prefix}.weight", (rows, cols), bits, scales, groups, kept, read, order),
        has_zeros=zeros is not None,
        are_halves=are_halves,
    )


def _signed_bytes(path: Path, stored: Stored, prefix: str, are_halves: Callable[[], bool]) -> StoredTensor:
    weight = find_part(path, stored, f"{prefix}.weight", ("I8",))
    name = f"{prefix}.weight_scale"
    scales = find_part(path, stored, name, _FLOAT, len(stored[name].shape) if name in stored else 2)
    rows, cols = weight.shape
    size = int(np.prod(scales.shape))
    groups = 1 if size == 1 else size // rows
    if size != 1 and (scales.shape[0] != rows or groups * rows != size or len(scales.shape) > 2):
        raise misfit(path, prefix)
    sources = [weight, scales]
    zeros = stored.get(f"{prefix}.weight_zero_point")
    if zeros is not None:
        if zeros.dtype != "I8" or zeros.shape != scales.shape:
            raise misfit(path, prefix)
        sources.append(zeros)

    def spread(numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.broadcast_to(numbers.reshape(-1, groups), (rows, groups)).copy()

    def read() -> Integers:
        points = np.zeros(scales.shape, np.uint8) if zeros is None else stored_numbers(zeros)
        codes = stored_numbers(weight) ^ np.uint8(0x80)
        return Integers(codes, spread(stored_numbers(scales)), spread(points) ^ np.uint8(0x80))

    return integer_matrix(
        *(weight, weight.name, (rows, cols), 8, scales, groups, tuple(sources), read),
        has_zeros=zeros is not None,
        are_halves=are_halves,
    )


def _codes(words: npt.NDArray[Any], bits: int) -> Bytes:
    """Unpacks the codes in the words of the last dimension, one per byte."""
    octets = np.ascontiguousarray(words, "<u4").view(np.uint8)
    if bits == 8:
        return octets
    if bits != 4:
        return unpacked_bits(octets, bits)
    return np.stack([octets & 15, octets >> 4], axis=-1).reshape(*octets.shape[:-1], -1)
