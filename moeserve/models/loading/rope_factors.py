"""The divisors of RoPE's frequencies, for both engines."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moeserve.models.interface import ModelShape
from moeserve.models.tensors import rope_factor_tensors


def rope_factors(shape: ModelShape, read: Callable[[str], torch.Tensor]) -> torch.Tensor | None:
    """Returns the divisors as `rope_tables` takes them, float32 [lists, any] on the CPU; None without any. read:
    returns the tensor with a name as float32."""
    if not any(form.has_rope_factors for form in shape.forms):
        return None
    return torch.stack([read(name) for name in rope_factor_tensors(shape)])
