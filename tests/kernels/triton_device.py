"""Where the Triton kernels are tested: on a GPU if there is one, else under Triton's interpreter."""

from __future__ import annotations

import os

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Before triton is imported: the conftest.py of every folder that may import it begins with this module.
    os.environ["TRITON_INTERPRET"] = "1"

if DEVICE == "cpu":
    from tests.kernels import faster_interpreter  # noqa: F401


def counter(n: int) -> torch.Tensor:
    """A batch's number of rows, as the kernels take it."""
    return torch.tensor([n], dtype=torch.int32, device=DEVICE)


def ints(values: object) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device=DEVICE)
