"""Triton's interpreter without what it does again and again to the same effect, and with products of bfloat16.

Imported before the first kernel runs. What kernels compute is otherwise what it was.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_and_index(tensor: object, scope: Any) -> None:
    """Triton 3.6's interpreter makes int() of one-element arrays, which numpy refuses from 2.4 on."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_tensor_and_index

_patch_lang = interpreter._patch_lang
_patched: set[frozenset[str]] = set()  # the languages that the kernel which runs has had patched


class _Launch:
    """The scope of a kernel's patches, as Triton restores it at the kernel's end."""

    def __init__(self, scope: Any) -> None:
        self._scope = scope

    def restore(self) -> None:
        _patched.clear()
        self._scope.restore()


def _patch_once(fn: Any) -> object:
    """Triton patches its language at each call of a function within a kernel, tl.sum and the like too. Once in a kernel
    is enough for functions that see the same names of it."""
    names = frozenset(name for name in ("tl", "core", "language") if name in fn.__globals__)
    if names in _patched:
        return None  # only a launch, which comes first, uses the result
    scope = _patch_lang(fn)
    _patched.add(names)
    return _Launch(scope)


interpreter._patch_lang = _patch_once

_np_dtype = interpreter._get_np_dtype
_np_dtype_of_scalar = functools.cache(_np_dtype)


def _cached_np_dtype(dtype: Any) -> np.dtype[Any]:
    """It would make its table anew at each call."""
    scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    pointer = isinstance(scalar, tl.pointer_type)
    return _np_dtype(scalar) if pointer else _np_dtype_of_scalar(scalar)


interpreter._get_np_dtype = _cached_np_dtype

_create_dot = interpreter.InterpreterBuilder.create_dot


def _with_float_operands(
    self: object, a: Any, b: Any, d: object, input_precision: object, max_num_imprecise_acc: object
) -> object:
    """The interpreter has bfloat16 as its bits, uint16, and would multiply these."""
    floats = (_float32_of(a), _float32_of(b))
    return _create_dot(self, *floats, d, input_precision, max_num_imprecise_acc)


def _float32_of(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    bits = handle.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


interpreter.InterpreterBuilder.create_dot = _with_float_operands
