"""The indexer of sparse attention, and attention to what it chooses."""

from __future__ import annotations

import torch

from moeserve.kernels.choice_rule import ChoiceRule
from moeserve.kernels.indexer import op
from moeserve.kernels.latent import op as latent
from tests.support.gpu_operators.tensors import empty, i32


def indexer(n: int, kind: torch.dtype) -> None:
    """GLM-5's, with a context of 128,000, and attention to its choice."""
    heads, dim, rotary, f16, rule = 32, 128, 64, torch.float16, ChoiceRule(2048)
    at, count, table = empty(n, dtype=i32), empty(1, dtype=i32), empty(3, 128_000, dtype=i32)
    q, keys = empty(n, heads * dim, dtype=kind), empty(n, dim + heads, dtype=kind)
    pool, queries, angles = (
        empty(50, 1, dim, dtype=f16),
        empty(n, heads, dim, dtype=f16),
        empty(9, rotary // 2),
    )
    for in_pairs in (False, True):
        op.index_store(
            q, keys[:, :dim], empty(dim), empty(dim), 1e-6, angles, angles, at, at, count, queries, pool,
            in_pairs=in_pairs,
        )  # fmt: skip
    scores, chosen = empty(n * 128_000), empty(n, 1, rule.top, dtype=i32)
    step = (table, at, at, count, at, n, rule)
    for are_prompts in (False, True):
        op.score_keys(queries, keys[:, dim:], pool, *step, scores, are_prompts=are_prompts)
    op.choose(scores, *step, chosen, at)
    heads, rank = 64, 512
    vectors = empty(50, 1, rank + rotary, dtype=f16)
    attending, rotated = empty(n, heads, rank, dtype=f16), empty(n, heads, rotary, dtype=f16)
    out, room = empty(n, heads, rank, dtype=kind), latent.decode_workspace(n, heads, rank, "meta")
    latent.decode_latent(attending, rotated, vectors, chosen[:, 0], at, at, count, room, out, least=4)
    latent.attend_chosen(attending, rotated, vectors, chosen[:, 0], at, at, count, out)
