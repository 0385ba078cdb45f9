"""The shapes of recurrent layers; alternatives to `AttentionShape`."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.kernels.delta_net.heads import DeltaHeads
from moeserve.models.mamba2 import Mamba2Shape
from moeserve.models.short_conv import ShortConvShape
from moeserve.models.sources.gguf import names as n


@dataclass(frozen=True, slots=True)
class GatedDeltaNetShape:
    """A gated DeltaNet layer (https://arxiv.org/abs/2412.06464): each sequence has a state of fixed size."""

    heads: DeltaHeads
    # True: one matrix computes b and a, per key head b and then a of its value heads. False: separate matrices.
    merged_gates: bool
    # Kimi Delta Attention: rank of the two-step products for decays and output gates. 0: both come from the layer's
    # input.
    gate_rank: int = 0
    has_full_gate: bool = False  # Kimi: with a rank, the decays' alone; output gates take one product
    has_positive_rate: bool = False  # in the file, `ssm_a` is exp(A_log); else -exp(A_log)

    @property
    def input_parts(self) -> tuple[tuple[str, int], ...]:
        """Names and rows of the matrices over the layer's input: qkv, z, then b and a. For Kimi: q, k, v, b, then
        a and z, or the first steps of these."""
        h = self.heads
        if h.is_kimi:
            qkv = ((n.ATTN_Q, h.key_width), (n.ATTN_K, h.key_width), (n.ATTN_V, h.value_width))
            a, z = self.gate_rank or h.decays, self.gate_rank or h.value_width
            of_z = (n.SSM_G, h.value_width) if self.has_full_gate else (n.SSM_G_A, z)
            return *qkv, (n.SSM_BETA, h.value_heads), (n.SSM_F_A, a), of_z
        parts = ((n.ATTN_QKV, h.channels), (n.ATTN_GATE, h.value_width))
        if self.merged_gates:
            return *parts, (n.SSM_BA, 2 * h.value_heads)
        return *parts, (n.SSM_BETA, h.value_heads), (n.SSM_ALPHA, h.value_heads)

    @property
    def input_width(self) -> int:
        """Total rows of `input_parts`."""
        return sum(rows for _, rows in self.input_parts)

    @property
    def gate_parts(self) -> tuple[tuple[str, int], ...]:
        """Names and rows of the second-step matrices of a and z (Kimi)."""
        if not self.gate_rank:
            return ()
        of_a, of_z = (n.SSM_F_B, self.heads.decays), (n.SSM_G_B, self.heads.value_width)
        return (of_a,) if self.has_full_gate else (of_a, of_z)

    @property
    def conv_parts(self) -> tuple[str, ...]:
        """Names of the convolutions' weights, in channel order."""
        return n.SSM_CONVS if self.heads.is_kimi else (n.SSM_CONV1D,)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that determine the matrices' dimensions, by metadata name."""
        h = self.heads
        if h.is_kimi:
            of_rank = {"columns of ssm_f_b.weight": self.gate_rank} if self.gate_rank else {}
            return {"kda.head_dim": h.key_dim} | of_rank
        return {"ssm.state_size": h.key_dim, "ssm.inner_size / ssm.time_step_rank": h.value_dim}

    @property
    def undivided(self) -> str:
        """The layer kind's name in messages that ranks cannot share it; "" if they can."""
        return "Kimi Delta Attention" if self.heads.is_kimi else ""

    @property
    def output_part(self) -> str:
        return n.ATTN_OUTPUT if self.heads.is_kimi else n.SSM_OUT

    def tensors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Returns the tensors by name within a layer, with row-major shapes; without the input norm."""
        h = self.heads
        parts: dict[str, tuple[int, ...]] = {
            n.of_part(part): (rows, hidden) for part, rows in self.input_parts
        }
        parts |= {n.of_part(part): (rows, self.gate_rank) for part, rows in self.gate_parts}
        if h.is_kimi:
            widths = (h.key_width, h.key_width, h.value_width)
            convs = zip(n.SSM_CONVS, widths, strict=True)
            parts |= {n.of_part(part): (width, 1, h.conv_kernel) for part, width in convs}
        else:
            parts[n.of_part(n.SSM_CONV1D)] = (h.channels, h.conv_kernel)
        return parts | {
            n.SSM_A: (h.value_heads, 1) if h.is_kimi else (h.value_heads,),
            n.bias_of_part(n.SSM_DT): (h.decays,),
            n.of_part(n.SSM_NORM): (h.value_dim,),
            n.of_part(self.output_part): (hidden, h.value_width),
        }


Recurrence = GatedDeltaNetShape | Mamba2Shape | ShortConvShape
