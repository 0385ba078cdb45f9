"""Paged attention. In C++: `CpuStream.attention`, with a plan of the step's sequences from `build_attention_plan`."""

from moeserve.kernels.attention import reference

__all__ = ["reference"]
