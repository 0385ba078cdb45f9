"""The specification of 8-bit KV caches. q8_0: each 32 consecutive numbers of a head as int8 codes with a float16
scale.

x = scale * code, where scale = max|x| / 127 rounded to float16, and code is the integer nearest to x / scale, ties
to even, within 127 of 0. 34 bytes per 32 numbers, as in GGML's block of that name; but codes and scales are two
tensors, so that both can be read in whole words. fp8: e4m3, with a scale per token and head. In C++: `quantize_kv`
in csrc/arch/shared/attention_q8.inl; in Triton: kv_triton.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

KV_BLOCK = 32  # numbers per scale
FP8_MAX = 448.0


def quantize_kv(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises x, floats [.., dim], dim a multiple of 32, in blocks of 32 numbers. Returns codes, int8 of the same
    shape, and scales, float16 [.., dim / 32].

    A block with NaN or infinity gets the scale NaN, so that the fault stays visible.
    """
    blocks = x.float().unflatten(-1, (-1, KV_BLOCK))
    scales = (blocks.abs().amax(dim=-1, keepdim=True) / 127.0).half()
    kept = scales.float()
    scaled = blocks * torch.where(kept > 0, 1.0 / kept, 0.0)
    codes = scaled.round().clamp(-127, 127).nan_to_num(0.0).to(torch.int8)
    is_number = blocks.isfinite().all(dim=-1, keepdim=True)
    return codes.view(x.shape), torch.where(is_number, scales, torch.nan).squeeze(-1)


def dequantize_kv(codes: Tensor, scales: Tensor) -> Tensor:
    """Returns scale * code, exact: float64 of the codes' shape."""
    return codes.double() * scales.double().repeat_interleave(codes.shape[-1] // scales.shape[-1], dim=-1)


def quantize_kv_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises float32 [.., dim]. Returns e4m3 of the same shape, torch's float8_e4m3fn, and scales, float16 [..,
    1].

    x = scale * number, where scale = max|x| / 448 rounded to float16, and number is the nearest to x / scale, ties
    to even, within the type's largest, 448. A head with NaN or infinity gets the scale NaN.
    """
    heads = x.float()
    scales = (heads.abs().amax(dim=-1, keepdim=True) / FP8_MAX).half()
    kept = scales.float()
    scaled = heads * torch.where(kept > 0, 1.0 / kept, 0.0)
    numbers = scaled.clamp(-FP8_MAX, FP8_MAX).nan_to_num(0.0).to(torch.float8_e4m3fn)
    is_number = heads.isfinite().all(dim=-1, keepdim=True)
    return numbers, torch.where(is_number, scales, torch.nan)
