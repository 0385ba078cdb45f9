"""The operations of `CpuStream` on index keys, by which sparse attention chooses keys."""

from __future__ import annotations

import torch

from moeserve.kernels import _C
from moeserve.kernels.operation_queue import OperationQueue
from moeserve.kernels.stream_operands import KvLayer


class IndexOperations(OperationQueue):
    """Operations for `CpuStream`, whose docstring gives the rules for arguments and errors."""

    def index_store(
        self,
        q: torch.Tensor | None,
        keys: torch.Tensor,
        norm: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        kv: KvLayer,
        n: int,
        heads: int,
        *,
        in_pairs: bool,
        positions: torch.Tensor | None = None,
    ) -> None:
        """Rotates the index queries in place and stores the tokens' index keys, as indexer/reference.py specifies.
        positions: as in `rope_store`.

        q [n, heads * dim], None where no row chooses keys; keys [n, dim]; norm, bias [dim]; cos, sin [n, rotary / 2];
        slots int32 [n]. 32 divides `dim` and `rotary`. eps: added to the variance under the LayerNorm's root.
        """
        assert kv.index_keys is not None
        self._native.index_store(
            q, keys, norm, bias, eps, cos, sin, positions, slots, kv.index_keys, n, heads, in_pairs
        )
        self._held.append((q, keys, norm, bias, cos, sin, positions, slots, kv))

    def index_blocks(
        self,
        plan: _C.AttentionPlan,
        q: torch.Tensor,
        keys: torch.Tensor,
        q_norm: torch.Tensor,
        k_norm: torch.Tensor,
        eps: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: KvLayer,
        heads: int,
        *,
        first_angles: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Normalises and rotates the index queries of the plan's rows in place, and stores index keys as
        indexer/blocks.py specifies: of each token, or of each block that the rows complete. Keys of blocks that are not
        complete are stored unchanged, for a later call.

        plan: built with a rule that chooses. q [n, heads * dim]; keys [n, dim]; q_norm, k_norm [dim]; cos, sin
        [positions, rotary / 2]: row p is used at position p. 32 divides `dim` and `rotary`. first_angles: cos and sin
        of the first key of each row's block, [n, rotary / 2]; cos and sin are then by row, too. eps: added to the mean
        square under the norm's root."""
        assert kv.index_keys is not None
        first_cos, first_sin = first_angles or (None, None)
        self._native.index_blocks(
            plan, q, keys, q_norm, k_norm, eps, cos, sin, first_cos, first_sin, kv.index_keys, heads
        )
        self._held.append((plan, q, keys, q_norm, k_norm, cos, sin, first_angles, kv))

    def index_pools(
        self,
        plan: _C.AttentionPlan,
        keys: torch.Tensor,
        gates: torch.Tensor,
        norm: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        ape: torch.Tensor,
        kv: KvLayer,
    ) -> None:
        """Stores the normalised keys and the gates of the plan's rows, and the index keys of the blocks that they
        complete, as indexer/pools.py specifies. `kv.index_keys`: [slots, 1, 2 * dim].

        plan: built with a rule that chooses, without local blocks. keys [n, dim], overwritten; gates [n, dim]; norm,
        bias [dim]; ape [keys of a block, dim]. 32 divides `dim`. eps: added to the variance under the LayerNorm's root.
        """
        assert kv.index_keys is not None
        self._native.index_pools(plan, keys, gates, norm, bias, eps, ape, kv.index_keys)
        self._held.append((plan, keys, gates, norm, bias, ape, kv))

    def choose_keys(
        self, plan: _C.AttentionPlan, q: torch.Tensor, weights: torch.Tensor | None, kv: KvLayer, heads: int
    ) -> None:
        """Chooses the keys of the plan's rows, which later calls of `attention` with this plan read: the choice of
        indexer/reference.py or blocks.py, in float32 over the stored index keys.

        plan: built with a rule that chooses. A row that has at most as many blocks as the rule chooses attends to all
        keys. q [n, heads * dim]: from `index_store` or `index_blocks`; with `index_pools`, q as projected; weights [n,
        heads], None: all are 1.
        """
        assert kv.index_keys is not None
        self._native.choose_keys(plan, q, weights, kv.index_keys, heads)
        self._held.append((plan, q, weights, kv))
