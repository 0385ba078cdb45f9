"""Matrices of 4-bit floats (E2M1), two a byte, the first in the low bits; no value is rounded.

    compressed-tensors, nvfp4   weight_packed [out, in / 2], weight_scale F8_E4M3 [out, in / 16], weight_global_scale,
                                by which the scales are divided
    compressed-tensors, mxfp4   weight_packed [out, in / 2], weight_scale U8 [out, in / 32]: exponents of two
    ModelOpt, NVFP4             weight [out, in / 2], weight_scale F8_E4M3 [out, in / 16], weight_scale_2, by which the
                                scales are multiplied
    DeepSeek-V4's experts       weight I8 [out, in / 2], scale F8_E8M0 [out, in / 32]

Formats: https://github.com/vllm-project/compressed-tensors, https://nvidia.github.io/Model-Optimizer. Scales of
activations (input_scale, input_global_scale) are ignored: they are for products in 4 bits, and moeserve's products take
more bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from moeserve.models.errors import ModelError, SettingError
from moeserve.quantization import QuantType
from moeserve.quantization.table import MXFP4, NVFP4_TYPES

from .made_tensor import Bytes, find_part, misfit
from .safetensors_file import EXPONENTS, FP8, PackedWeight, StoredTensor, stored_numbers

Stored = dict[str, StoredTensor]
_NVFP4_GROUP, _MXFP4_GROUP = 16, 32  # columns


def packed_fp4_matrix(path: Path, stored: Stored, prefix: str) -> StoredTensor:
    """Returns a 4-bit float matrix of compressed-tensors, under the name that the matrix has in an unquantised
    checkpoint. Raises ModelError if a part of it is missing or does not fit."""
    weight = find_part(path, stored, f"{prefix}.weight_packed", ("U8",))
    scales = find_part(path, stored, f"{prefix}.weight_scale", (FP8, "U8"))
    if scales.dtype == "U8":
        return _mxfp4(path, prefix, weight, scales)
    name = f"{prefix}.weight_global_scale"
    return _nvfp4(path, prefix, weight, scales, _own_scale(path, stored, name), lambda divisor: 1 / divisor)


def with_packed_experts(path: Path, stored: Stored) -> Stored:
    """Returns the tensors with DeepSeek-V4's 4-bit matrices in place of their parts. Raises ModelError if a part is
    missing or does not fit."""
    found = dict(stored)
    for name, tensor in stored.items():
        scales = f"{name.removesuffix('.weight')}.scale"
        if tensor.dtype == "I8" and name.endswith(".weight") and scales in found:
            prefix = name.removesuffix(".weight")
            weight = find_part(path, stored, name, ("I8",))
            found[name] = _mxfp4(path, prefix, weight, find_part(path, found, scales, (EXPONENTS,)))
            del found[scales]
    return found


def modelopt_matrix(path: Path, stored: Stored, prefix: str) -> StoredTensor:
    """Returns ModelOpt's NVFP4 matrix, converted to blocks when it is read: 4-bit floats (U8), a scale (FP8) for each
    group of 16 columns, and one float32 scale for the matrix. Raises ModelError if one of these is missing or does not
    fit."""
    weight = find_part(path, stored, f"{prefix}.weight", ("U8",))
    scales = find_part(path, stored, f"{prefix}.weight_scale", (FP8,))
    own = _own_scale(path, stored, f"{prefix}.weight_scale_2")
    return _nvfp4(path, prefix, weight, scales, own, lambda factor: factor)


def _own_scale(path: Path, stored: Stored, name: str) -> StoredTensor:
    """Finds the matrix's own scale, a positive number."""
    dimensions = len(stored[name].shape) if name in stored else 1
    own = find_part(path, stored, name, ("F32",), dimensions)
    if math.prod(own.shape) != 1:
        raise SettingError(path, f"tensor {name!r} has shape {list(own.shape)}; one number is expected")
    value = float(_number(own))
    if not (math.isfinite(value) and value > 0 and 1 / value <= float(np.finfo(np.float32).max)):
        raise SettingError(path, f"tensor {name!r} is {value}; a positive number is expected")
    return own


def _number(tensor: StoredTensor) -> np.float32:
    return np.float32(stored_numbers(tensor).reshape(-1).view(np.float32)[0])


def _nvfp4(
    path: Path,
    prefix: str,
    weight: StoredTensor,
    scales: StoredTensor,
    own: StoredTensor,
    factor: Callable[[np.float32], np.float32],
) -> StoredTensor:
    rows, cols = _shape(path, prefix, weight, scales, _NVFP4_GROUP)
    width = next((n for n in sorted(NVFP4_TYPES, reverse=True) if cols % n == 0), None)
    if width is None:
        raise SettingError(
            path,
            f"tensor {weight.name!r} has {cols} columns; of NVFP4 multiples of {min(NVFP4_TYPES)} are supported",
        )
    kind = NVFP4_TYPES[width]

    def make() -> Bytes:
        octets = stored_numbers(scales)
        if ((octets == 127) | (octets > 128)).any():
            raise ModelError(
                path, f"tensor {scales.name!r} has scales that are negative or no numbers; download it again"
            )
        out = np.empty((rows, cols // width, kind.block_bytes), np.uint8)
        out[..., :4] = np.array([factor(_number(own))], np.float32).view(np.uint8)
        out[..., 4 : 4 + width // _NVFP4_GROUP] = octets.reshape(rows, -1, width // _NVFP4_GROUP)
        out[..., 4 + width // _NVFP4_GROUP :] = stored_numbers(weight).reshape(rows, -1, width // 2)
        return out.reshape(rows, -1)

    return _matrix(prefix, weight, (rows, cols), PackedWeight(kind, make, (weight, scales, own)))


def _mxfp4(path: Path, prefix: str, weight: StoredTensor, scales: StoredTensor) -> StoredTensor:
    rows, cols = _shape(path, prefix, weight, scales, _MXFP4_GROUP)
    kind: QuantType = MXFP4

    def make() -> Bytes:
        pairs = stored_numbers(weight).reshape(rows, -1, _MXFP4_GROUP // 2)
        return np.concatenate([stored_numbers(scales)[..., None], halves_of_pairs(pairs)], axis=-1).reshape(
            rows, -1
        )

    return _matrix(prefix, weight, (rows, cols), PackedWeight(kind, make, (weight, scales)))


def halves_of_pairs(pairs: Bytes) -> Bytes:
    """Returns a block's bytes [.., 16], uint8, in another order: byte j holds the codes of columns 2j and 2j + 1
    before, and of columns j and j + 16 after."""
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], _MXFP4_GROUP)
    packed: Bytes = codes[..., : _MXFP4_GROUP // 2] | codes[..., _MXFP4_GROUP // 2 :] << 4
    return packed


def _shape(
    path: Path, prefix: str, weight: StoredTensor, scales: StoredTensor, group: int
) -> tuple[int, int]:
    rows, cols = weight.shape[0], 2 * weight.shape[1]
    if scales.shape != (rows, cols // group) or cols % group:
        raise misfit(path, prefix)
    return rows, cols


def _matrix(prefix: str, weight: StoredTensor, shape: tuple[int, int], packed: PackedWeight) -> StoredTensor:
    return StoredTensor(
        weight.path,
        f"{prefix}.weight",
        shape,
        weight.dtype,
        weight.start,
        weight.end,
        weight.buffer,
        weight.version,
        packed=packed,
    )
