"""The shapes of indexers, which choose the keys that each query attends to, and their tensors. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.kernels.choice_rule import ALL_KEYS, ChoiceRule
from moeserve.models.sources.gguf import names as n


@dataclass(frozen=True, slots=True)
class IndexerShape:
    """DeepSeek Sparse Attention's indexer (https://arxiv.org/abs/2512.02556, section 2.1):
    kernels/indexer/reference.py has the arithmetic. Queries with at most `top` keys attend to all. With `pooled`
    above 1 it chooses blocks of keys by pooled index keys: kernels/indexer/pools.py."""

    num_heads: int
    # Of an index key and of a head's query, whose first numbers rotate: as many as attention's `rotary_dim`.
    dim: int
    top: int  # keys chosen for each query; blocks of `pooled` keys
    in_pairs: bool  # pairs of neighbours rotate, not halves
    eps: float = 1e-6  # of the keys' LayerNorm; Hugging Face's code has no setting for it
    keys_from: int | None = None  # the earlier layer whose choice is used (https://arxiv.org/abs/2603.12201)
    pooled: int = 1  # keys of a block; above 1, nothing rotates

    @property
    def is_pooled(self) -> bool:
        return self.pooled > 1

    @property
    def rule(self) -> ChoiceRule:
        return ChoiceRule(self.top, self.pooled)

    @property
    def index_width(self) -> int:
        """Width of what a token stores in the KV cache: its index key, and a gate if index keys are pooled."""
        return 0 if self.keys_from is not None else self.dim + self.gate_width

    @property
    def gate_width(self) -> int:
        """Width of the gate that weighs a token's key in its block's index key; 0: no gate."""
        return self.dim if self.is_pooled else 0

    @property
    def choices(self) -> int:  # of each query
        return 1

    @property
    def q_width(self) -> int:
        return self.num_heads * self.dim

    def tensors(self, hidden: int, q_rank: int) -> dict[str, tuple[int, ...]]:
        """Returns the tensors by name within a layer, with row-major shapes."""
        if self.keys_from is not None:
            return {}
        of_pools = {
            n.of_part(n.INDEX_POOLS.gate): (self.dim, hidden),
            n.of_part(n.INDEX_POOLS.bias): (self.pooled, self.dim),
        }
        return (of_pools if self.is_pooled else {}) | {
            n.of_part(n.INDEXER_K): (self.dim, hidden),
            n.of_part(n.INDEXER_Q_B): (self.q_width, q_rank),
            n.of_part(n.INDEXER_PROJ): (self.num_heads, hidden),
            n.of_part(n.INDEXER_K_NORM): (self.dim,),
            n.bias_of_part(n.INDEXER_K_NORM): (self.dim,),
        }


@dataclass(frozen=True, slots=True)
class BlockIndexerShape:
    """An indexer that chooses blocks of keys: kernels/indexer/blocks.py has the arithmetic. Its norms have the model's
    `rms_eps`, and its heads rotate like those of attention."""

    num_heads: int
    dim: int  # of an index key and of a head's query
    rule: ChoiceRule

    @property
    def index_width(self) -> int:
        """Width of the index key that a token stores in the KV cache."""
        return self.dim

    @property
    def choices(self) -> int:
        """Number of choices of keys that each query makes: one, or one for each KV head."""
        return self.num_heads if self.rule.by_head else 1

    @property
    def q_width(self) -> int:
        return self.num_heads * self.dim

    def tensors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Returns the tensors by name within a layer, with row-major shapes."""
        return {
            n.of_part(n.INDEXER_Q_PROJ): (self.q_width, hidden),
            n.of_part(n.INDEXER_K_PROJ): (self.dim, hidden),
            n.of_part(n.INDEXER_Q_NORM): (self.dim,),
            n.of_part(n.INDEXER_K_NORM): (self.dim,),
        }


class ChoosesKeys:
    """Properties that all attention shapes with an optional indexer share."""

    __slots__ = ()
    indexer: IndexerShape | BlockIndexerShape | None

    @property
    def index_width(self) -> int:
        """Width of the index key that a token stores in the KV cache; 0: no index key."""
        return 0 if self.indexer is None else self.indexer.index_width

    @property
    def uses_earlier_choice(self) -> bool:
        """True if queries attend to the keys that an earlier layer's indexer chose."""
        return isinstance(self.indexer, IndexerShape) and self.indexer.keys_from is not None

    @property
    def rule(self) -> ChoiceRule:
        """Returns the rule by which a query chooses its keys, among those within its window."""
        return ALL_KEYS if self.indexer is None else self.indexer.rule
