"""The shape of attention over grouped heads, and the union of all kinds of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moeserve.models.compressed import CompressedAttentionShape
from moeserve.models.indexer import BlockIndexerShape, ChoosesKeys
from moeserve.models.latent import AttentionForm, LatentAttentionShape
from moeserve.models.sources.gguf import names as n

# RMS norm of q and k before RoPE: none; per head; per head without weights; over all heads as one vector.
QkNorm = Literal["none", "head", "unweighted", "full"]
# Gates that multiply attention's output, after a sigmoid. in_q: rows of q's matrix (per head q, then its gate).
# element, head: a separate matrix, with a gate per output number or per head. head_softplus: like head, with softplus.
OutputGate = Literal["none", "in_q", "element", "head", "head_softplus"]


@dataclass(frozen=True, slots=True)
class AttentionShape(ChoosesKeys):
    """Grouped-query attention (https://arxiv.org/abs/2305.13245) with RoPE."""

    num_heads: int
    num_kv_heads: int  # divides num_heads
    head_dim: int  # even
    qk_norm: QkNorm = "none"
    qkv_bias: bool = False
    output_bias: bool = False
    rotated: int | None = None  # leading dimensions of a head that rotate, with split halves; None: all
    window: int = 0  # a position attends to itself and the window - 1 before it; 0: to all before it
    has_sinks: bool = False  # each head's softmax has one more logit, without a value
    gate: OutputGate = "none"
    scale: float | None = None  # of attention scores; None: 1 / sqrt(head_dim)
    score_cap: float = 0.0  # c: scores become c * tanh(score / c); 0: unchanged
    has_v_norm: bool = False  # v is RMS-normalised per head, without weights
    v_from_k: bool = False  # v has no matrix: it is k before norm and RoPE
    rope_theta: float | None = None  # None: the model's `rope_theta`
    has_rope_factors: bool = False  # the file has divisors for the frequencies
    has_positions: bool = True  # q and k are rotated; False: no positional encoding
    value_dim: int | None = None  # width of a head's value; None: head_dim
    v_scale: float = 1.0  # multiplies v
    norm_after: bool = False  # the per-head norms of q and k come after RoPE
    rope_scaled: bool = True  # the model's `rope_scaling` applies; False: it does not
    kv_from: int | None = None  # the earlier layer whose k and v are used; None: its own
    in_pairs: bool = False  # in the file, pairs of neighbours rotate; loading/head_order.py makes them halves
    indexer: BlockIndexerShape | None = None  # chooses the keys that queries attend to; None: all

    @property
    def form(self) -> AttentionForm:
        return AttentionForm(
            self.num_heads, self.num_kv_heads, self.head_dim, self.rotary_dim, self.rope_theta, self.has_rope_factors,
            self.has_positions, self.v_dim, self.rope_scaled,
        )  # fmt: skip

    @property
    def qkv_parts(self) -> tuple[str, ...]:
        """Names of the matrices that multiply the layer's input."""
        if self.kv_from is not None:
            return (n.ATTN_Q,)
        return (n.ATTN_Q, n.ATTN_K) if self.v_from_k else (n.ATTN_Q, n.ATTN_K, n.ATTN_V)

    @property
    def is_gated(self) -> bool:  # q's matrix contains gates
        return self.gate == "in_q"

    @property
    def has_gate_matrix(self) -> bool:
        return self.gate not in ("none", "in_q")

    @property
    def gate_width(self) -> int:
        """Number of gates per token."""
        of_gate = self.output_width if self.gate in ("in_q", "element") else self.num_heads
        return 0 if self.gate == "none" else of_gate

    @property
    def v_dim(self) -> int:
        """Width of a head's value."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def q_width(self) -> int:
        """Width of q without gates."""
        return self.num_heads * self.head_dim

    @property
    def q_rows(self) -> int:  # of its matrix
        return self.q_width * (2 if self.is_gated else 1)

    @property
    def kv_width(self) -> int:
        """Width of all heads' keys."""
        return self.num_kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Width of all heads' values."""
        return self.num_kv_heads * self.v_dim

    @property
    def output_width(self) -> int:
        """Input width of the output product."""
        return self.num_heads * self.v_dim

    @property
    def kv_widths(self) -> tuple[int, ...]:
        """Widths of the vectors that a token stores in the KV cache, per KV head."""
        return () if self.kv_from is not None else (self.head_dim, self.v_dim)

    @property
    def attended_values(self) -> int:
        """Number of multiply-adds for each pair of a query token and a key token."""
        return self.q_width + self.output_width

    @property
    def rotary_dim(self) -> int:
        """Number of rotated dimensions per head."""
        return self.head_dim if self.rotated is None else self.rotated


Attention = AttentionShape | LatentAttentionShape | CompressedAttentionShape
