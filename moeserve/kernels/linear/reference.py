"""The specification of the linear layer."""

from __future__ import annotations

from torch import Tensor


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T with float64 sums: float64 [n, out] of x [n, in] and weight [out, in], any float type.

    `weight` is the dequantised matrix (gguf-py's `gguf.quants.dequantize`, which is ggml's). With x float32 this is the
    truth. With x what `quantize.reference` leaves of it, this is what the kernels of the integer formats compute,
    except that they round their float32 accumulators once a group of 32 columns.
    """
    return x.double() @ weight.double().T
