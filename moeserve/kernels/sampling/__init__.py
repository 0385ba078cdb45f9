"""Choosing tokens from rows of logits.

`csrc/sampling.h` states the rules and the order of the filters; `reference.py` is the same in plain torch,
with a sort; `cpu.py` is the C++ behind the worker.
"""

from moeserve.kernels.sampling.cpu import MAX_TOP_LOGPROBS, SamplerState, uniform_at

__all__ = ["MAX_TOP_LOGPROBS", "SamplerState", "uniform_at"]
