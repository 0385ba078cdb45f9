"""Choosing a token's experts. In C++: `CpuStream.route`."""

from moeserve.kernels.routing import reference

__all__ = ["reference"]
