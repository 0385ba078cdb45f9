"""The hand-off of a layer's CPU experts: the GPU publishes rows, the CPU pool answers, all within one stream.

`ExpertHandoff` is the whole of it; docs/explanation/gpu-engine.md shows one layer of it in time.
"""

from moeserve.kernels.handoff import reference
from moeserve.kernels.handoff.expert_handoff import CpuExperts, ExpertHandoff, HandoffError

__all__ = ["CpuExperts", "ExpertHandoff", "HandoffError", "reference"]
