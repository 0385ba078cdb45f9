"""The hand-off of a layer's CPU experts: the GPU publishes rows, and the CPU pool answers, within one CUDA stream.

`ExpertHandoff` is the interface; docs/explanation/gpu-engine.md shows the timing of one layer.
"""

from moeserve.kernels.handoff import reference
from moeserve.kernels.handoff.expert_handoff import CpuExperts, ExpertHandoff, HandoffError

__all__ = ["CpuExperts", "ExpertHandoff", "HandoffError", "reference"]
