"""The shape of a Mamba-2 layer; an alternative to `AttentionShape`."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.kernels.mamba2.heads import Mamba2Heads
from moeserve.models.sources.gguf import names as n


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    """A Mamba-2 layer (https://arxiv.org/abs/2405.21060): each sequence has a state of fixed size."""

    heads: Mamba2Heads
    # True: the file stores norm's weight as [groups, width of a group]; False: as one vector.
    norm_by_group: bool
    eps: float  # epsilon of the norm
    has_norm: bool = True  # False: the gated output is not normalised

    @property
    def input_width(self) -> int:
        """Number of rows of the matrix that multiplies the layer's input."""
        return self.heads.row_width

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that determine the matrices' dimensions, by metadata name."""
        h = self.heads
        return {"ssm.state_size": h.state_dim, "ssm.inner_size / ssm.time_step_rank": h.head_dim}

    @property
    def undivided(self) -> str:
        """The name of this kind of layer in error messages that say that several GPUs cannot divide it."""
        return "Mamba-2"

    @property
    def output_part(self) -> str:
        return n.SSM_OUT

    def tensors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Returns the tensors by name within a layer, with row-major shapes; without the input norm."""
        h = self.heads
        norm = (h.num_groups, h.group_width) if self.norm_by_group else (h.value_width,)
        of_norm: dict[str, tuple[int, ...]] = {n.of_part(n.SSM_NORM): norm} if self.has_norm else {}
        return of_norm | {
            n.of_part(n.SSM_IN): (h.row_width, hidden),
            n.of_part(n.SSM_CONV1D): (h.channels, h.conv_kernel),
            n.bias_of_part(n.SSM_CONV1D): (h.channels,),
            n.SSM_A: (h.num_heads, 1),
            n.SSM_D: (h.num_heads, 1),
            n.bias_of_part(n.SSM_DT): (h.num_heads,),
            n.of_part(n.SSM_OUT): (hidden, h.value_width),
        }
