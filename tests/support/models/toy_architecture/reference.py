"""The toy architecture in plain torch, in float64: none of the package's code."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from tests.support.models.toy_architecture.model_file import (
    EPS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    SCALE,
    THETA,
    TOP_K,
    Weights,
)


def logits(weights: Weights, tokens: list[int]) -> Tensor:
    """float64 [len(tokens), vocab]: the prediction after each position."""
    w = {name: torch.from_numpy(values).double() for name, values in weights.items()}
    x = w["token_embd.weight"][tokens]
    for layer in range(LAYERS):
        of = {name.split(".")[2]: values for name, values in w.items() if name.startswith(f"blk.{layer}.")}
        x = x + _attention(of, _norm(x, of["attn_norm"]))
        x = x + _experts(of, _norm(x, of["ffn_norm"]))
    return _norm(x, w["output_norm.weight"]) @ w["output.weight"].T


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def _attention(w: dict[str, Tensor], y: Tensor) -> Tensor:
    n = len(y)
    q = _rotate(_norm(y @ w["attn_q"].T, w["attn_q_norm"]).view(n, HEADS, HEAD_DIM))
    k = _rotate(_norm(y @ w["attn_k"].T, w["attn_k_norm"]).view(n, KV_HEADS, HEAD_DIM))
    v = (y @ w["attn_v"].T).view(n, KV_HEADS, HEAD_DIM)
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / HEAD_DIM**0.5
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    probabilities = scores.masked_fill(future, -torch.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", probabilities, v).reshape(n, -1) @ w["attn_output"].T


def _rotate(heads: Tensor) -> Tensor:
    """Halves of a head turn together; positions from 0 on."""
    half = HEAD_DIM // 2
    frequencies = THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(len(heads), dtype=torch.float64)[:, None, None] * frequencies
    a, b = heads[..., :half], heads[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def _experts(w: dict[str, Tensor], y: Tensor) -> Tensor:
    """Weights are the softmax over all experts, not made to sum to 1, times the scale; the shared expert's is 1."""
    weights, ids = (y @ w["ffn_gate_inp"].T).softmax(-1).topk(TOP_K)
    out = _gated(y, w["ffn_gate_shexp"], w["ffn_up_shexp"], w["ffn_down_shexp"])
    rows = []
    for row, weight, chosen in zip(y, weights, ids, strict=True):
        each = [
            _gated(row, w["ffn_gate_exps"][e], w["ffn_up_exps"][e], w["ffn_down_exps"][e]) for e in chosen
        ]
        rows.append(SCALE * (weight[:, None] * torch.stack(each)).sum(0))
    return out + torch.stack(rows)


def _gated(y: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (silu(y @ gate.T) * (y @ up.T)) @ down.T
