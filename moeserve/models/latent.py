"""The shape of latent attention (MLA) and its tensors; an alternative to `AttentionShape`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moeserve.models.indexer import ChoosesKeys, IndexerShape
from moeserve.models.sources.gguf import names as n

LatentGate = Literal["none", "head", "element"]
HEADS_TOGETHER = 8  # heads of one token that a CPU thread processes together, at most


def head_parts(num_heads: int) -> int:
    """Returns the smallest number of equal parts into which the heads can be divided so that a part has at most
    HEADS_TOGETHER heads."""
    fitting = (p for p in range(1, num_heads + 1) if num_heads % p == 0)
    return next(p for p in fitting if num_heads // p <= HEADS_TOGETHER)


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """A form of attention: layers of equal form share buffers, RoPE angles and plans."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float | None = None  # None: the model's
    has_rope_factors: bool = False
    has_positions: bool = True  # False: all angles are 0
    value_dim: int = 0  # width of a head's value; 0 for latent attention, where it is `rank`
    rope_scaled: bool = True  # False: the model's `rope_scaling` does not apply


@dataclass(frozen=True, slots=True)
class LatentAttentionShape(ChoosesKeys):
    """Multi-head latent attention (https://arxiv.org/abs/2405.04434) in absorbed form. All heads attend to one
    vector per token, [latent | rotated key], whose latent part is also their value."""

    num_heads: int
    q_rank: int  # width of the compressed q; 0: q is computed from the layer's input
    rank: int  # width of a latent vector
    nope_dim: int  # a head's q and k begin with this many dimensions without rotation
    rotary_dim: int  # and end with this many rotated ones, in pairs of neighbours
    value_dim: int
    scale: float  # of attention scores
    # Epsilon of the norms of the latent vector and of the compressed q. Hugging Face's code uses this value and
    # ignores `rms_norm_eps` (GLM-4.7-Flash's is 1e-5).
    latent_eps: float = 1e-6
    input_bias: bool = False  # `biased_parts` have biases
    output_bias: bool = False
    has_positions: bool = True  # False: no positional encoding
    indexer: IndexerShape | None = None  # chooses the keys that queries attend to; None: they attend to all
    # Each head's output, or each of its numbers, is multiplied by the sigmoid of a product of the layer's input.
    gate: LatentGate = "none"

    @property
    def num_kv_heads(self) -> int:
        return 1

    @property
    def head_dim(self) -> int:
        """Width of a cached vector, and of a query in the latent space."""
        return self.rank + self.rotary_dim

    @property
    def form(self) -> AttentionForm:
        return AttentionForm(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.rotary_dim,
            has_positions=self.has_positions,
        )

    @property
    def gate_width(self) -> int:
        """Number of gates per token."""
        return {"none": 0, "head": self.num_heads, "element": self.output_width}[self.gate]

    @property
    def q_width(self) -> int:
        """Width of all heads' queries in the latent space."""
        return self.num_heads * self.head_dim

    @property
    def q_rows(self) -> int:
        """Rows of q's matrix."""
        return self.num_heads * (self.nope_dim + self.rotary_dim)

    @property
    def latent_width(self) -> int:
        """Width of all heads' outputs in the latent space."""
        return self.num_heads * self.rank

    @property
    def output_width(self) -> int:
        """Input width of the output product."""
        return self.num_heads * self.value_dim

    @property
    def kv_widths(self) -> tuple[int, ...]:
        """Widths of the vectors that a token stores in the KV cache, per KV head."""
        return (self.head_dim,)

    @property
    def attended_values(self) -> int:
        """Number of multiply-adds for each pair of a query token and a key token."""
        return self.num_heads * (self.head_dim + self.rank)

    @property
    def head_parts(self) -> int:
        """Number of equal parts into which the heads are divided for CPU threads."""
        return head_parts(self.num_heads)

    @property
    def input_parts(self) -> tuple[tuple[str, int], ...]:
        """Names and numbers of rows of the matrices that multiply the layer's input: that of q or compressed q, of the
        latent, then of the gates."""
        q = (n.ATTN_Q_A, self.q_rank) if self.q_rank else (n.ATTN_Q, self.q_rows)
        gate = ((n.ATTN_GATE, self.gate_width),) if self.gate != "none" else ()
        return q, (n.ATTN_KV_A_MQA, self.head_dim), *gate

    @property
    def biased_parts(self) -> tuple[str, ...]:
        """The `input_parts` with biases; q's own matrix and the gates' never have one."""
        unbiased = (n.ATTN_Q, n.ATTN_GATE)
        return tuple(part for part, _ in self.input_parts if part not in unbiased) if self.input_bias else ()

    @property
    def input_width(self) -> int:
        """Total rows of `input_parts`."""
        return sum(rows for _, rows in self.input_parts)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that determine the matrices' dimensions, by metadata name."""
        sizes = {
            "attention.kv_lora_rank": self.rank,
            "attention.key_length_mla - rope.dimension_count": self.nope_dim,
            "attention.value_length_mla": self.value_dim,
        }
        return sizes | ({"attention.q_lora_rank": self.q_rank} if self.q_rank else {})

    def tensors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Returns the tensors by name within a layer, with row-major shapes; without the input norm."""
        parts: dict[str, tuple[int, ...]] = {
            n.of_part(part): (rows, hidden) for part, rows in self.input_parts
        }
        if self.q_rank:
            parts[n.of_part(n.ATTN_Q_A_NORM)] = (self.q_rank,)
            parts[n.of_part(n.ATTN_Q_B)] = (self.q_rows, self.q_rank)
        rows_of = dict(self.input_parts)
        parts |= {n.bias_of_part(part): (rows_of[part],) for part in self.biased_parts}
        if self.output_bias:
            parts[n.bias_of_part(n.ATTN_OUTPUT)] = (hidden,)
        if self.indexer is not None:
            parts |= self.indexer.tensors(hidden, self.q_rank)
        return parts | {
            n.of_part(n.ATTN_KV_A_NORM): (self.rank,),
            n.of_part(n.ATTN_K_B): (self.num_heads, self.rank, self.nope_dim),
            n.of_part(n.ATTN_V_B): (self.num_heads, self.value_dim, self.rank),
            n.of_part(n.ATTN_OUTPUT): (hidden, self.output_width),
        }
