"""Activations as int8. The C++ code (`quantize` in csrc/arch/shared/rowwise.inl) runs inside the operations that
produce them: norm, attention and experts."""

from moeserve.kernels.quantize import reference

__all__ = ["reference"]
