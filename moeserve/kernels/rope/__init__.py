"""Norm and rotation of q and k, and their way into the KV pool. In C++: `CpuStream.rope_store`.

The angles come from the model (`moeserve.models.blocks.rope`).
"""

from moeserve.kernels.rope import reference

__all__ = ["reference"]
