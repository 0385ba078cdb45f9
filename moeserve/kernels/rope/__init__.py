"""Norm and RoPE of q and k, and the store to the KV pool. In C++: `CpuStream.rope_store`.

The model provides the angles (`moeserve.models.blocks.rope`).
"""

from moeserve.kernels.rope import reference

__all__ = ["reference"]
