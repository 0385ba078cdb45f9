"""The least kernel that shows whether Triton works here: it needs the driver, ptxas and a C compiler, as ours do."""

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
    """Whether the kernel computes what it should. Raises what Triton does."""
    x = torch.arange(_COUNT, dtype=torch.float32, device=device)
    out = torch.empty_like(x)
    _double[(1,)](x, out, _COUNT)
    return torch.equal(out, x * 2)
