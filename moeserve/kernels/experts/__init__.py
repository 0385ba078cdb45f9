"""The routed experts of a layer. In C++: `CpuStream.experts`, which reads an expert's weights once a step."""

from moeserve.kernels.experts import reference

__all__ = ["reference"]
