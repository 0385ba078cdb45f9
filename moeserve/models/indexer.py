"""The shape of an indexer, which chooses the keys that each query attends to, and its tensors."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.models.sources.gguf import names as n


@dataclass(frozen=True, slots=True)
class IndexerShape:
    """DeepSeek Sparse Attention's indexer (https://arxiv.org/abs/2512.02556, section 2.1): kernels/indexer/reference.py
    has the arithmetic. Queries with at most `top` keys attend to all."""

    num_heads: int
    dim: int  # of an index key and of a head's query, whose first numbers rotate: as many as attention's `rotary_dim`
    top: int  # keys chosen for each query
    in_pairs: bool  # pairs of neighbours rotate, not halves
    eps: float = 1e-6  # of the keys' LayerNorm; Hugging Face's code has no setting for it
    keys_from: int | None = None  # the earlier layer whose choice is used (https://arxiv.org/abs/2603.12201)

    @property
    def kv_widths(self) -> tuple[int, ...]:
        """Widths of the vectors that a token stores in the KV cache."""
        return (self.dim,) if self.keys_from is None else ()

    @property
    def q_width(self) -> int:
        return self.num_heads * self.dim

    def tensors(self, hidden: int, q_rank: int) -> dict[str, tuple[int, ...]]:
        """Returns the tensors by name within a layer, with row-major shapes."""
        if self.keys_from is not None:
            return {}
        return {
            n.of_part(n.INDEXER_K): (self.dim, hidden),
            n.of_part(n.INDEXER_Q_B): (self.q_width, q_rank),
            n.of_part(n.INDEXER_PROJ): (self.num_heads, hidden),
            n.of_part(n.INDEXER_K_NORM): (self.dim,),
            n.bias_of_part(n.INDEXER_K_NORM): (self.dim,),
        }
