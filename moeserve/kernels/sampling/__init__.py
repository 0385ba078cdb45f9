"""Choosing tokens from rows of logits.

`csrc/sampling/sampling.h` states the rules and the order of the filters; `reference.py` is the same in plain torch,
with a sort; `cpu.py` is the C++ behind the worker, `op.py` the kernels of a GPU.
"""

from moeserve.kernels.sampling import reference

__all__ = ["reference"]
