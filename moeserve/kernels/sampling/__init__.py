"""Chooses tokens from rows of logits.

`csrc/sampling/sampling.h` states the rules and the order of the filters; `reference.py` implements them in plain
torch, with a sort; `cpu.py` is the C++ sampler, `op.py` launches the GPU's kernels.
"""

from moeserve.kernels.sampling import reference

__all__ = ["reference"]
