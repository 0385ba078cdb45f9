"""Activations as int8. The C++ (`quantize` in csrc/arch/shared/rowwise.inl) runs inside the operations that make them:
norm, attention and experts."""

from moeserve.kernels.quantize import reference

__all__ = ["reference"]
