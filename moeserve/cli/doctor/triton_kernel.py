"""The smallest kernel that shows whether Triton works here: like the server's kernels it needs the driver, ptxas and a
C compiler."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COUNT = 256


# Triton evaluates annotations, where it can't find a module's own names.
@triton.jit  # type: ignore[untyped-decorator]
def _double(x, out, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, COUNT)
    tl.store(out + at, tl.load(x + at) * 2)


def doubles(device: str) -> bool:
    """Returns whether the kernel's result is right. Raises Triton's errors."""
    x = torch.arange(_COUNT, dtype=torch.float32, device=device)
    out = torch.empty_like(x)
    _double[(1,)](x, out, _COUNT)
    return torch.equal(out, x * 2)
