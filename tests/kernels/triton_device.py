"""Where the Triton kernels are tested: on a GPU if there is one, else under Triton's interpreter."""

from __future__ import annotations

import os

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = (
        "1"  # before triton is imported: the conftest.py of every folder that may import it begins with this module
    )

import triton.runtime.interpreter as interpreter  # noqa: E402

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_and_index(tensor: object, scope: object) -> None:
    """Triton 3.6's interpreter makes int() of one-element arrays, which numpy refuses from 2.4 on."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())  # type: ignore[attr-defined]


interpreter._patch_lang_tensor = _patch_tensor_and_index

_patch_lang = interpreter._patch_lang
_patched: set[frozenset[str]] = set()  # the languages that the kernel which runs has had patched


class _Launch:
    """The scope of a kernel's patches, as Triton restores it at the kernel's end."""

    def __init__(self, scope: object) -> None:
        self._scope = scope

    def restore(self) -> None:
        _patched.clear()
        self._scope.restore()  # type: ignore[attr-defined]


def _patch_once(fn: object) -> object:
    """Triton's interpreter patches its language at each call of a function within a kernel, tl.sum and the like too: three
    quarters of the time of many tests. Once in a kernel is enough for functions that see the same names of it."""
    names = frozenset(
        name for name in ("tl", "core", "language") if name in fn.__globals__  # type: ignore[attr-defined]
    )
    if names in _patched:
        return None  # only a launch, which comes first, uses the result
    scope = _patch_lang(fn)
    _patched.add(names)
    return _Launch(scope)


interpreter._patch_lang = _patch_once


def counter(n: int) -> torch.Tensor:
    """A batch's number of rows, as the kernels take it."""
    return torch.tensor([n], dtype=torch.int32, device=DEVICE)


def ints(values: object) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device=DEVICE)
