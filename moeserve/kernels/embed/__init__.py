"""Rows of the token embedding. In C++: `CpuStream.embed`."""

from moeserve.kernels.embed import reference

__all__ = ["reference"]
