"""Token embedding look-up. In C++: `CpuStream.embed`."""

from moeserve.kernels.embed import reference

__all__ = ["reference"]
