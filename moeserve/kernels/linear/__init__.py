"""Matrix times activations. In C++: `CpuStream.linear`; csrc/arch/shared/gemm.inl for the arithmetic."""

from moeserve.kernels.linear import reference

__all__ = ["reference"]
