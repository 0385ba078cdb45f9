"""The specification of the linear layer."""

from __future__ import annotations

from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns x W^T + b with float64 sums: float64 [n, out] of x [n, in], weight [out, in] and bias [out], any float
    type.

    `weight` is the dequantised matrix (gguf-py's `gguf.quants.dequantize`, which is ggml's). With x float32 this is the
    truth. With x rounded by `quantize.reference`, this is what the kernels of the integer formats compute, except that
    they round their float32 accumulators once per 32 columns."""
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()
