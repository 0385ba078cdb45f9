"""The operators' result shapes and dtypes, for torch.compile and meta tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.kernels.operators.pointwise import Pointwise, library


def embed(ids: Tensor, table: list[Tensor], kind: int, cols: int) -> Tensor:
    return ids.new_empty(len(ids), cols, dtype=torch.float32)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


def linear(x: Tensor, weight: list[Tensor], kind: int) -> Tensor:
    return x.new_empty(len(x), weight[0].shape[1])


def rope_store(
    q: Tensor, k: Tensor, v: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float, cos: Tensor, sin: Tensor,
    slots: Tensor, keys: Tensor, values: Tensor,
) -> Tensor:  # fmt: skip
    return torch.empty_like(q)


def attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, rows: Tensor, counts: Tensor, positions: Tensor,
    req_slots: Tensor,
) -> Tensor:  # fmt: skip
    return q.new_empty(len(q), q.shape[1] * q.shape[2])


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    shape = (len(logits), top_k)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape)


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate: list[Tensor], gate_kind: int, up: list[Tensor], up_kind: int,
    down: list[Tensor], down_kind: int,
) -> Tensor:  # fmt: skip
    return torch.empty_like(x)


def piecewise_attention(
    q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, distance: int, causal: bool, scale: float | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return q1.new_empty(q1.shape), q1.new_empty(q1.shape[:3], dtype=torch.float32)


def piecewise_attention_backward(
    q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, out: Tensor, lse: Tensor, gradient: Tensor,
    distance: int, causal: bool, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    return tuple(x.new_empty(x.shape) for x in (q1, k1, q2, k2, v))


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return _pointwise(library.silu_mul, gate, up)


def swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    return _pointwise(library.swiglu_oai, gate, up)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    return _pointwise(library.sigmoid_mul, x, gate)


def _pointwise(operation: Pointwise, *arguments: Tensor) -> Tensor:
    return operation.empty_result(*arguments)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    return logits.new_empty(len(logits), dtype=torch.int32)
