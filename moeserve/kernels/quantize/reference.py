"""The specification of quantised activations: int8 with a scale and two sums per group of 32 columns.

x = scale * code with scale = max|x| / 127 over the group and the code rounded to nearest, ties to even. Rounding
errors are uniform over a step. If one column dominates a group, the error is 32 / (12 * 127^2) = 1.65e-4 of the
signal's power, otherwise less: 3e-5 for Gaussian activations. The sums let a kernel add a weight's zero point or
min once per group.

Layout of a row, as in csrc/arch/kernels.h: `cols` codes, then META for each group. 1.5 bytes per column.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

GROUP = 32  # columns
NOTHING = 1e-30  # a group whose largest magnitude is at most this is zero
META = np.dtype([("scale", "<f4"), ("scaled_sum", "<f4"), ("sum_lo", "<i4"), ("sum_hi", "<i4")])


@dataclass(frozen=True, slots=True)
class Quantized:
    codes: Tensor  # int8 [n, cols], -127 .. 127
    scales: Tensor  # float32 [n, cols / 32]

    def dequantize(self) -> Tensor:
        """Returns scale * code, exact: float64 [n, cols]."""
        return self.codes.double() * self.scales.double().repeat_interleave(GROUP, dim=1)

    def rows(self) -> Tensor:
        """Returns the form that the kernels read: uint8 [n, 1.5 * cols]."""
        n, cols = self.codes.shape
        sums = self.codes.view(n, -1, 2, GROUP // 2).sum(dim=3, dtype=torch.int32)
        meta = np.empty((n, cols // GROUP), META)
        meta["scale"] = self.scales.numpy()
        meta["scaled_sum"] = (self.scales * sums.sum(dim=2).float()).numpy()
        meta["sum_lo"], meta["sum_hi"] = sums[:, :, 0].numpy(), sums[:, :, 1].numpy()
        packed = torch.from_numpy(meta.view(np.uint8).reshape(n, -1))
        return torch.cat([self.codes.view(torch.uint8), packed], dim=1)


def quantize(x: Tensor) -> Quantized:
    """Returns float32 [n, cols] quantised to int8 codes and float32 scales by groups of 32 columns; cols a multiple of
    32. Every step is in float32: the kernels give the same bits. A group with NaN or infinity gets the scale NaN (and
    undefined codes), so that the fault stays visible."""
    groups = x.view(len(x), -1, GROUP)
    largest = groups.abs().amax(dim=2, keepdim=True)
    # A number over a tensor is a product with the reciprocal in torch, which may be off by a unit.
    inverse = torch.where(largest > NOTHING, torch.full_like(largest, 127.0) / largest, 0.0)
    codes = (groups * inverse).round().nan_to_num(0.0).to(torch.int8)
    scales = torch.where(largest.isfinite(), largest / 127.0, torch.nan)
    return Quantized(codes.view(x.shape), scales.squeeze(2))


def round_trip(x: Tensor) -> Tensor:
    """Returns the activations' values after quantisation: float64 of x's shape [n, cols]."""
    return quantize(x.float()).dequantize()
