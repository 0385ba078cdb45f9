"""The decode rows' own tokens, which attention stores in the pool itself."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moeserve.kernels.rope.op import SectionPositions


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The rows' own tokens as projected, with the parameters of `rope_store` (rope/op.py)."""

    k: Tensor  # [n, kv_heads * dim], rows at any stride, as v and as q
    v: Tensor  # [n, kv_heads * v_dim]
    q_norm: Tensor | None  # float32 [dim], None: no norm
    k_norm: Tensor | None
    eps: float
    cos: Tensor  # float32 [positions, rotary_dim / 2]
    sin: Tensor
    slots: Tensor  # int32 [n], below 0: not stored
    v_eps: float | None = None
    norm_after: bool = False
    v_scale: float = 1.0
    sections: SectionPositions | None = None
