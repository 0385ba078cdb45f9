"""The indexer of sparse attention, and attention to what it chooses."""

from __future__ import annotations

import torch

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.attention.chosen_op import attend_blocks
from moeserve.kernels.attention.workspace import DecodeWorkspace
from moeserve.kernels.choice_rule import ChoiceRule, stride_of_choice
from moeserve.kernels.indexer import op
from moeserve.kernels.latent import op as latent
from moeserve.kernels.stream_operands import KvLayer
from tests.support.measuring.gpu_operators.tensors import both, empty, i32


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
    scores, chosen = empty(n * stride_of_choice(128_000, rule)), empty(n, 1, rule.top, dtype=i32)
    step = (table, at, at, count, at, n, rule)
    for are_prompts in (False, True):
        op.score_keys(queries, keys[:, dim:], pool, *step, scores, are_prompts=are_prompts)
    op.choose(scores, *step, chosen, at)
    heads, rank = 64, 512
    vectors = empty(50, 1, rank + rotary, dtype=f16)
    attending, rotated = empty(n, heads, rank, dtype=f16), empty(n, heads, rotary, dtype=f16)
    out, room = empty(n, heads, rank, dtype=kind), latent.decode_workspace(n, heads, rank, rotary, "meta")
    latent.decode_latent(
        attending, rotated, vectors, chosen[:, 0], at, at, count, room, out, chosen=chosen.shape[2]
    )
    latent.attend_chosen(attending, rotated, vectors, chosen[:, 0], at, at, count, out)


def pooled_indexer(n: int, kind: torch.dtype) -> None:
    """GLM-5.3-Flash's, with a context of 128,000, and attention to its choice, in which nothing rotates."""
    heads, dim, f16, rule, length = 32, 128, torch.float16, ChoiceRule(512, 4), 128_000
    at, count, table = empty(n, dtype=i32), empty(1, dtype=i32), empty(3, length, dtype=i32)
    q, projected = empty(n, heads * dim, dtype=kind), empty(n, dim + heads + dim, dtype=kind)
    keys, weights, gates = projected.split([dim, heads, dim], dim=1)
    pool, queries = empty(50, 1, 2 * dim, dtype=f16), empty(n, heads, dim, dtype=f16)
    op.pool_store(
        *(q, keys, gates, empty(dim), empty(dim), 1e-6, empty(rule.block, dim)),
        *(table, at, at, at, count, queries, pool),
    )
    scores = empty(n * stride_of_choice(length, rule))
    chosen, step = empty(n, 1, rule.most_blocks * rule.block, dtype=i32), (table, at, at, count, at, n, rule)
    for are_prompts in (False, True):
        op.score_keys(queries, weights, pool, *step, scores, are_prompts=are_prompts)
    op.choose(scores, *step, chosen, at)
    heads, rank, nope = 64, 512, 192
    vectors, latents = empty(50, 1, rank, dtype=f16), empty(n, rank, dtype=kind)
    attending, rotated, angles = empty(n, heads, rank, dtype=f16), empty(n, heads, 0, dtype=f16), empty(9, 0)
    of_q, nopes = empty(n, heads * nope, dtype=kind), empty(n, heads, nope, dtype=torch.bfloat16)
    latent.latent_store(
        of_q, latents, empty(rank), 1e-6, angles, angles, at, at, count, 0.1, nopes, rotated, vectors
    )
    out, room = empty(n, heads, rank, dtype=kind), latent.decode_workspace(n, heads, rank, 0, "meta")
    latent.decode_latent(
        attending, rotated, vectors, chosen[:, 0], at, at, count, room, out, chosen=chosen.shape[2]
    )
    latent.attend_chosen(attending, rotated, vectors, chosen[:, 0], at, at, count, out)


def block_indexer(n: int, kind: torch.dtype) -> None:
    """MiniMax-M3's and Flash-Next's, and attention to their choice."""
    dim, f16, length = 128, torch.float16, 128_000
    at, count, table = empty(n, dtype=i32), empty(1, dtype=i32), empty(3, length, dtype=i32)
    pool, angles, norm = empty(50, 1, dim, dtype=f16), empty(9, 32), empty(dim)
    for rule, width, heads, kv_heads in (
        (ChoiceRule(15, 128, 1), 128, 64, 4),
        (ChoiceRule(512, 4), 256, 24, 2),
    ):
        choices, index_heads = (kv_heads, kv_heads) if rule.local else (1, 4)
        q, keys, queries = (
            empty(n, index_heads * dim, dtype=kind),
            empty(n, dim, dtype=kind),
            empty(n, index_heads, dim, dtype=f16),
        )
        op.block_index_store(
            q, keys, norm, norm, 1e-6, angles, angles, table, at, at, at, count, rule, queries, pool
        )
        scores = empty(n * choices * stride_of_choice(length, rule))
        chosen, step = empty(n, choices, rule.most_blocks, dtype=i32), (table, at, at, count, at, n, rule)
        for are_prompts in (False, True):
            if rule.local:
                op.score_blocks(queries, pool, *step, scores, are_prompts=are_prompts)
            else:
                op.score_keys(queries, None, pool, *step, scores, are_prompts=are_prompts)
        op.choose(scores, *step, chosen, at)
        out = GpuActivations(*both(n, heads * width, kind))
        kv = KvLayer(*(empty(50, kv_heads, width, dtype=f16) for _ in range(2)))
        of_8_bits = KvLayer(
            *(empty(50, kv_heads, width, dtype=torch.int8) for _ in range(2)),
            *(empty(50, kv_heads, width // 32, dtype=f16) for _ in range(2)),
        )
        for layer in (kv, of_8_bits):
            for room in (DecodeWorkspace(n, heads, kv_heads, width, "meta"), None):
                attend_blocks(
                    empty(n, heads, width, dtype=f16),
                    layer,
                    table,
                    at,
                    chosen,
                    at,
                    count,
                    rule.block,
                    room,
                    out,
                )
