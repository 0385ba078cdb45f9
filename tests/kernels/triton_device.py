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


def counter(n: int) -> torch.Tensor:
    """A batch's number of rows, as the kernels take it."""
    return torch.tensor([n], dtype=torch.int32, device=DEVICE)


def ints(values: object) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device=DEVICE)
