"""RMSNorm. In C++: `CpuStream.norm`."""

from moeserve.kernels.norm import reference

__all__ = ["reference"]
