"""Launches the router: its product with the norm before it, and the choice of experts."""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.l1_preference import L1_ROWS
from moeserve.kernels.launch import next_power_of_2, pdl, row_stride
from moeserve.kernels.routing.norm_router import norm_router_kernel
from moeserve.kernels.routing.options import DEFAULT_ROUTER, RouterOptions
from moeserve.kernels.routing.triton import route_kernel, select_streamed_routes_kernel

BLOCK = 256  # routes per program


def route(
    logits: Tensor,
    expert_map: Tensor | None,
    count: Tensor,
    ids: Tensor,
    local_expert_ids: Tensor | None,
    weights: Tensor,
    expert_token_counts: Tensor | None,
    *,
    options: RouterOptions = DEFAULT_ROUTER,
    bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
    by_token: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Chooses each row's experts: ids int32, weights float32 [n, top_k], from logits [n, experts]; rows from
    count[0] on get ids -1 and weights 0.

    ids, weights and local_expert_ids may be columns of wider tensors, all of one width. bias float32 [experts]:
    added to the scores for choosing (`RouterOptions`), not to the weights. expert_scale float32 [experts]:
    multiplies a chosen expert's weight. local_expert_ids int32 [n, top_k] = expert_map[ids]; expert_map int32
    [experts]: index on this device, negative if elsewhere. expert_token_counts int64 [experts]: each expert's
    tokens are added. by_token: int32 [vocab, top_k], the experts of each token id, all in range, and int32 [n], the
    rows' token ids; the logits then only weigh them. Raises ValueError if the options do not fit.
    """
    n, experts = logits.shape
    per_program = 4 if n % 4 == 0 and n >= 1024 else 1
    top_k = ids.shape[1]
    options.check(experts, top_k)
    route_kernel(
        (n // per_program,),
        logits,
        bias,
        expert_scale,
        expert_map,
        *((None, None) if by_token is None else by_token),
        count,
        ids,
        local_expert_ids,
        weights,
        expert_token_counts,
        experts,
        top_k,
        row_stride(ids, weights, local_expert_ids),
        options.scoring,
        options.normalize,
        options.scale,
        options.groups,
        options.top_groups,
        options.group_best,
        per_program,
        next_power_of_2(experts),
        next_power_of_2(top_k),
        pdl(),
        num_warps=per_program,
        launch_pdl=pdl(),
        prefers_l1=n <= L1_ROWS,
    )


def norm_router(
    x: Tensor,
    extra: Tensor,
    count: Tensor,
    weight: Tensor,
    eps: float,
    router: Tensor,
    y: Tensor | None,
    codes: Tensor | None,
    scales: Tensor | None,
    logits: Tensor,
    *,
    bias: Tensor | None = None,
) -> None:
    """Computes y[i] = RMSNorm(x[i] + extra[i]) * weight, logits[i] = router y[i] + bias, for i < count[0]; x stays
    unchanged. Only for few rows.

    x, extra float32 [n, cols]; router floats [experts, cols]; bias float32 [experts]; logits float32 [n, experts]; y
    and codes with scales: GpuActivations [n, cols]. eps: added to the mean square under the norm's root."""
    n, cols = x.shape
    experts = logits.shape[1]
    at_once = experts_at_once(n)
    norm_router_kernel(
        (-(-experts // at_once) + 1, n),
        x,
        extra,
        count,
        weight,
        router,
        bias,
        y,
        codes,
        scales,
        logits,
        cols,
        experts,
        next_power_of_2(cols),
        at_once,
        eps,
        pdl(),
        num_warps=4 if at_once <= 2 else 8,
        launch_pdl=pdl(),
        prefers_l1=n <= L1_ROWS,
    )


def experts_at_once(rows: int) -> int:
    """Returns the experts per program of `norm_router`."""
    return max(1, min(8, next_power_of_2(rows) >> 1))  # 128 programs or 256


def select_streamed_routes(
    ids: Tensor, expert_map: Tensor, streamed_ids: Tensor, local_expert_ids: Tensor
) -> None:
    """Selects the routes, ids int32 [n, top_k], to the experts of expert_map int32 [experts] (below 0: not one of
    them): streamed_ids int32 [n, top_k] = expert_map[ids], -1 for ids below 0, and local_expert_ids =
    max(local_expert_ids, streamed_ids). They may be columns of wider tensors, all of one width."""
    select_streamed_routes_kernel(
        (-(-ids.numel() // BLOCK),),
        ids,
        expert_map,
        streamed_ids,
        local_expert_ids,
        ids.numel(),
        expert_map.numel(),
        ids.shape[1],
        row_stride(ids, streamed_ids, local_expert_ids),
        BLOCK,
        num_warps=4,
    )
