"""The row-wise kernels (norm, RoPE and KV write, routing) against their references."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_device import DEVICE, counter, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.experts.op import shared_gate
from moeserve.kernels.experts.reference import shared_gate as gate_reference
from moeserve.kernels.experts.weigh_input import weigh_input
from moeserve.kernels.norm.op import add_norm
from moeserve.kernels.norm.reference import norm
from moeserve.kernels.rope.op import rope_store
from moeserve.kernels.rope.reference import rope_store as rope_reference
from moeserve.kernels.routing.op import norm_router, route, select_streamed_routes
from moeserve.kernels.routing.options import RouterOptions
from moeserve.kernels.routing.reference import route as route_reference
from moeserve.kernels.routing.reference import select_streamed_routes as reference_select
from tests.kernels.rows.triton_rows import EPS, GUARD, check_norm, guarded, normal
from tests.kernels.weights import nmse
from tests.support.nightly import nightly_after


@pytest.mark.parametrize("cols", [64, 768])
def test_residual_and_norm(cols: int) -> None:
    x, parts, extra = normal(4, cols), normal(4, 3, cols, seed=1), normal(4, cols, seed=2)
    weights, weight = normal(4, 3, seed=3), normal(cols, seed=4)
    ids = torch.tensor([[0, -1, 2], [1, 1, 1], [-1, -1, -1], [0, 0, 0]], dtype=torch.int32)
    there = (ids >= 0)[..., None].double()
    total = x.double() + extra + (parts * weights[..., None] * there).sum(1)
    mine = x.to(DEVICE)
    y, exact = guarded(4, cols), torch.full((4, cols), GUARD, device=DEVICE)
    add_norm(
        mine, parts.to(DEVICE), weights.to(DEVICE), ids.to(DEVICE), extra.to(DEVICE), None, counter(3),
        weight.to(DEVICE), EPS, y.x, y.codes, y.scales, exact,
    )  # fmt: skip
    assert nmse(mine[:3].cpu(), total[:3]) < 1e-12
    assert torch.equal(mine[3].cpu(), x[3])
    check_norm(y, norm(total[:3], weight, EPS), 3)
    assert torch.equal(exact, y.x)


def test_what_was_attended_is_added_too() -> None:
    x, attended, extra, weight = (
        normal(*shape, seed=seed) for seed, shape in enumerate([(2, 96)] * 3 + [(96,)])
    )
    total = x.double() + attended + extra
    for others in (extra.to(DEVICE), None):
        mine, y = x.clone().to(DEVICE), guarded(2, 96)
        add_norm(
            mine, None, None, None, others, None, counter(2), weight.to(DEVICE), EPS, y.x, y.codes, y.scales,
            attended=attended.to(DEVICE),
        )  # fmt: skip
        expected = total if others is not None else total - extra
        assert nmse(mine.cpu(), expected) < 1e-12
        check_norm(y, norm(expected, weight, EPS), 2)


@pytest.mark.parametrize("cols", [64, 96])
def test_layer_norm(cols: int) -> None:
    """The mean is that of the columns, not of the power of two above them; the residual keeps its own."""
    x, attended, weight = normal(3, cols) + 3, normal(3, cols, seed=1), normal(cols, seed=2)
    mine, y = x.clone().to(DEVICE), guarded(3, cols)
    add_norm(
        mine, None, None, None, None, None, counter(2), weight.to(DEVICE), EPS, y.x, y.codes, y.scales,
        attended=attended.to(DEVICE), centered=True,
    )  # fmt: skip
    total = x.double() + attended
    assert nmse(mine[:2].cpu(), total[:2]) < 1e-12
    check_norm(y, norm(total[:2], weight, EPS, centered=True), 2)


def test_norm_of_chosen_rows_leaves_the_residual() -> None:
    x, parts, weight = normal(5, 96), normal(5, 1, 96, seed=1), normal(96, seed=2)
    mine = x.to(DEVICE)
    y = guarded(3, 96)
    add_norm(
        mine, parts.to(DEVICE), None, None, None, ints([4, 0, 2]), counter(2), weight.to(DEVICE), EPS,
        y.x, y.codes, y.scales,
    )  # fmt: skip
    assert torch.equal(mine.cpu(), x)
    check_norm(y, norm((x + parts[:, 0])[[4, 0]], weight, EPS), 2)


def test_weights_multiply_what_experts_read() -> None:
    """In the weights' place is 1 then: the sum of experts' outputs takes them as they are. A row that does not exist
    keeps its."""
    x, weights, kept = normal(4, 96), normal(4, 3, seed=1), torch.full((4, 1), GUARD, device=DEVICE)
    y, mine = guarded(4, 96), weights.clone().to(DEVICE)
    weigh_input(x.to(DEVICE), mine[:, :1], counter(3), y, kept)
    check_norm(y, (x * weights[:, :1])[:3].double(), 3)
    assert torch.equal(kept[:3].cpu(), weights[:3, :1])
    assert (kept[3] == GUARD).all()
    assert mine[:, 0].tolist() == [1.0, 1.0, 1.0, weights[3, 0]]
    assert torch.equal(mine[:, 1:].cpu(), weights[:, 1:])


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 1, 128), (6, 2, 32), (4, 4, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rope_and_kv_write(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    n, live, slots = 4, 3, 11
    fused = normal(n, (heads + 2 * kv_heads) * dim).to(dtype)
    q, k, v = fused.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    q_norm, k_norm = normal(dim, seed=1), normal(dim, seed=2)
    angles = torch.rand(20, dim // 2, generator=torch.Generator().manual_seed(3)) * 6
    positions, slot = torch.tensor([19, 0, 7, 3]), torch.tensor([10, 2, 5, 0])
    keys, values = torch.zeros(slots, kv_heads, dim), torch.zeros(slots, kv_heads, dim)
    expected = rope_reference(
        q[:live].unflatten(1, (heads, dim)), k[:live].unflatten(1, (kv_heads, dim)),
        v[:live].unflatten(1, (kv_heads, dim)), q_norm, k_norm, EPS, angles.cos()[positions[:live]],
        angles.sin()[positions[:live]], slot[:live], keys, values,
    )  # fmt: skip
    mine = fused.to(DEVICE)
    q_out = torch.full((n, heads, dim), GUARD, device=DEVICE)
    my_keys, my_values = torch.zeros_like(keys, device=DEVICE), torch.zeros_like(values, device=DEVICE)
    rope_store(
        *mine.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1), q_norm.to(DEVICE), k_norm.to(DEVICE), EPS,
        angles.cos().to(DEVICE), angles.sin().to(DEVICE), ints(positions), ints(slot), counter(live), q_out,
        my_keys, my_values,
    )  # fmt: skip
    assert nmse(q_out[:live].cpu(), expected) < 1e-12
    assert (q_out[live:] == GUARD).all()
    assert nmse(my_keys.cpu(), keys) < 1e-12
    assert torch.equal(my_values.cpu(), values)


def test_a_row_without_a_slot_stores_nothing() -> None:
    q, k, v, ones = normal(1, 32), normal(1, 32), normal(1, 32), torch.ones(32, device=DEVICE)
    keys, values = torch.zeros(3, 1, 32, device=DEVICE), torch.zeros(3, 1, 32, device=DEVICE)
    angle = torch.zeros(1, 16, device=DEVICE)
    rope_store(
        q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), ones, ones, EPS, angle, angle, ints([0]), ints([-1]), counter(1),
        torch.empty(1, 1, 32, device=DEVICE), keys, values,
    )  # fmt: skip
    assert not keys.any()
    assert not values.any()


@pytest.mark.parametrize(
    ("norms", "rotary"),
    [("none", 48), ("head", 16), ("none", 32), ("full", 48), ("full", 16), ("q alone", 48), ("behind", 16)],
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4)])
def test_rope_of_other_families(norms: str, rotary: int, heads: int, kv_heads: int) -> None:
    """No norm, one of all heads together, heads that rotate in part, norms behind the rotation; the columns that do not
    rotate stay."""
    n, live, slots, dim = 4, 3, 11, 48
    widths = [heads * dim, kv_heads * dim, kv_heads * dim]
    fused = normal(n, sum(widths))
    q, k, v = (part[:live].unflatten(1, (-1, dim)) for part in fused.split(widths, dim=1))
    q_norm, k_norm = {
        "none": (None, None), "head": (normal(dim, seed=1), normal(dim, seed=2)),
        "full": (normal(heads * dim, seed=1), normal(kv_heads * dim, seed=2)),
        "q alone": (normal(dim, seed=1), None),
        "behind": (normal(dim, seed=1), normal(dim, seed=2)),
    }[norms]  # fmt: skip
    angles = torch.rand(20, rotary // 2, generator=torch.Generator().manual_seed(3)) * 6
    positions, slot = torch.tensor([19, 0, 7, 3]), torch.tensor([10, 2, 5, 0])
    keys, values = torch.zeros(slots, kv_heads, dim), torch.zeros(slots, kv_heads, dim)
    cos, sin = angles.cos() * 1.3, angles.sin() * 1.3  # stretched angles have a factor, which changes a norm
    expected = rope_reference(
        q, k, v, q_norm, k_norm, EPS, cos[positions[:live]], sin[positions[:live]], slot[:live], keys, values,
        norm_after=norms == "behind",
    )  # fmt: skip
    if norms == "none" and rotary < dim:
        assert torch.equal(keys[slot[:live], :, rotary:], k[..., rotary:])
    q_out = torch.full((n, heads, dim), GUARD, device=DEVICE)
    my_keys, my_values = torch.zeros_like(keys, device=DEVICE), torch.zeros_like(values, device=DEVICE)
    mine = [None if w is None else w.to(DEVICE) for w in (q_norm, k_norm)]
    rope_store(
        *fused.to(DEVICE).split(widths, dim=1), *mine, EPS, cos.to(DEVICE), sin.to(DEVICE), ints(positions), ints(slot),
        counter(live), q_out, my_keys, my_values, norm_after=norms == "behind",
    )  # fmt: skip
    assert nmse(q_out[:live].cpu(), expected) < 1e-12
    assert (q_out[live:] == GUARD).all()
    assert nmse(my_keys.cpu(), keys) < 1e-12
    assert torch.equal(my_values.cpu(), values)


def test_norms_and_angles_that_fit_no_head_are_refused() -> None:
    q, k, v = (torch.zeros(1, 64, device=DEVICE) for _ in "qkv")
    pool, out = torch.zeros(3, 2, 32, device=DEVICE), torch.empty(1, 2, 32, device=DEVICE)
    for norm_size, angle_size, message in ((48, 16, "a norm of 48"), (32, 17, "34 columns")):
        weight, angle = torch.ones(norm_size, device=DEVICE), torch.zeros(1, angle_size, device=DEVICE)
        with pytest.raises(ValueError, match=message):
            rope_store(
                q, k, v, weight, None, EPS, angle, angle, ints([0]), ints([0]), counter(1), out, pool, pool
            )


ROUTERS = [
    RouterOptions("softmax", normalize=False),
    RouterOptions("softmax", scale=2.5),
    RouterOptions("sigmoid"),
    RouterOptions("sigmoid", normalize=False, scale=0.5),
    RouterOptions("sqrt_softplus", scale=1.5),
    RouterOptions("sqrt_softplus", normalize=False),
    RouterOptions("softmax_topk"),
    RouterOptions("sigmoid", scale=2.5, groups=4, top_groups=2),
    RouterOptions("softmax", groups=3, top_groups=1, normalize=False),
    RouterOptions("softmax", groups=3, top_groups=1, group_best=1),
    RouterOptions("softmax_topk", groups=12, top_groups=5),
]


@pytest.mark.parametrize("with_bias", nightly_after(1, [True, False]))
@pytest.mark.parametrize("options", ROUTERS, ids=str)
def test_routers(options: RouterOptions, with_bias: bool) -> None:
    """Every way to choose, into columns of wider tensors, of which the last stays as it is."""
    n, live, experts, top_k = 9, 8, 12, 4
    logits = normal(n, experts) * 2
    logits[1] = 0.25  # all equal: the lowest ids of the lowest groups
    logits[2] -= 60.0  # sigmoids of 1e-26, which a sum of 1 would swallow
    bias = normal(experts, seed=5) * 0.3 if with_bias else None
    expected = route_reference(logits[:live], top_k, options, bias)
    ids = torch.full((n, top_k + 1), -7, dtype=torch.int32, device=DEVICE)
    local, weights = ids.clone(), torch.full((n, top_k + 1), GUARD, device=DEVICE)
    where = torch.arange(experts, dtype=torch.int32).flip(0) - 2
    route(
        logits.to(DEVICE), where.to(DEVICE), counter(live), ids[:, :top_k], local[:, :top_k], weights[:, :top_k], None,
        options=options, bias=None if bias is None else bias.to(DEVICE),
    )  # fmt: skip
    assert torch.equal(ids[:live, :top_k].cpu(), expected[0])
    assert torch.equal(local[:live, :top_k].cpu(), where[expected[0].long()])
    assert torch.allclose(weights[:live, :top_k].cpu().double(), expected[1], rtol=2e-5, atol=1e-12)
    assert (ids[live:, :top_k] == -1).all()
    assert (weights[live:, :top_k] == 0).all()
    assert (ids[:, top_k] == -7).all()
    assert (weights[:, top_k] == GUARD).all()


def test_experts_by_token_id() -> None:
    """A table chooses, and the logits weigh; an embedding's row, which has no token, takes token 0's."""
    n, live, experts, top_k = 5, 4, 12, 3
    logits, table = normal(n, experts) * 2, torch.stack([torch.randperm(experts)[:top_k] for _ in range(7)])
    tokens = torch.tensor([6, 0, 3, -9, 5])
    options = RouterOptions("sqrt_softplus", scale=1.5)
    expected = route_reference(logits, top_k, options, given=table[tokens.clamp(min=0)])
    ids, where = torch.full((n, top_k), -7, dtype=torch.int32, device=DEVICE), torch.arange(experts).int() - 2
    local, weights, counts = ids.clone(), torch.empty(n, top_k, device=DEVICE), torch.zeros(experts).long()
    counted = counts.to(DEVICE)
    route(
        logits.to(DEVICE), where.to(DEVICE), counter(live), ids, local, weights, counted, options=options,
        by_token=(ints(table), ints(tokens)),
    )  # fmt: skip
    assert torch.equal(ids[:live].cpu(), expected[0][:live])
    assert torch.equal(local[:live].cpu(), where[expected[0][:live].long()])
    assert torch.allclose(weights[:live].cpu().double(), expected[1][:live], rtol=2e-5, atol=1e-12)
    assert (ids[live:] == -1).all()
    assert torch.equal(counted.cpu(), torch.bincount(expected[0][:live].flatten(), minlength=experts))


def test_a_router_that_cannot_choose_so_many_is_refused() -> None:
    ids = torch.empty(1, 4, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="groups"):
        route(
            torch.zeros(1, 12, device=DEVICE), None, counter(1), ids, None, torch.empty(1, 4, device=DEVICE), None,
            options=RouterOptions(groups=4, top_groups=1),
        )  # fmt: skip


@pytest.mark.parametrize("has_weight", [True, False])
def test_shared_gate(has_weight: bool) -> None:
    n, live, cols = 5, 3, 96
    x, weight = normal(n, cols) / 4, normal(cols, seed=1)
    weights = torch.full((n, 4), GUARD, device=DEVICE)
    ids = torch.full((n, 4), 77, dtype=torch.int32, device=DEVICE)
    shared_gate(
        x.to(DEVICE), weight.to(DEVICE) if has_weight else None, counter(live), weights[:, 3], ids[:, 3]
    )
    expected = gate_reference(x[:live], weight if has_weight else None)[:, 0]
    assert torch.allclose(weights[:live, 3].cpu().double(), expected, rtol=1e-5)
    assert (weights[live:] == GUARD).all()
    assert (weights[:, :3] == GUARD).all()
    assert ids[:, 3].tolist() == [0, 0, 0, -1, -1]
    assert (ids[:, :3] == 77).all()


@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (10, 3), (4, 4), (5, 1)])
def test_routing(experts: int, top_k: int) -> None:
    n, live = 6, 5
    logits = normal(n, experts) * 3
    logits[1] = 0.25  # all equal: the lowest ids
    logits[2, -1] = 80.0
    logits[3, : experts // 2] = -80.0
    logits[4] = -1.0
    logits[4, ::2], logits[4, 0], logits[4, 1] = 0.0, -0.0, float("-inf")  # both zeros are equal
    ids, weights = route_reference(logits[:live], top_k)
    mine = torch.full((n, top_k), -7, dtype=torch.int32, device=DEVICE)
    local = torch.full((n, top_k), -7, dtype=torch.int32, device=DEVICE)
    mine_weights = torch.full((n, top_k), GUARD, device=DEVICE)
    many = (1 << 32) - 1  # tokens, as a server has counted after some days
    expert_token_counts = torch.full((experts,), many, dtype=torch.int64, device=DEVICE)
    where = torch.arange(experts, dtype=torch.int32).flip(0) - 2
    route(logits.to(DEVICE), where.to(DEVICE), counter(live), mine, local, mine_weights, expert_token_counts)
    assert torch.equal(mine[:live].cpu(), ids)
    assert torch.equal(local[:live].cpu(), where[ids.long()])
    assert torch.allclose(mine_weights[:live].cpu().double(), weights, rtol=1e-5, atol=1e-12)
    assert (mine[live:] == -1).all()
    assert (mine_weights[live:] == 0).all()
    assert torch.equal(
        expert_token_counts.cpu() - many, torch.bincount(ids.flatten().long(), minlength=experts)
    )


@pytest.mark.parametrize(("rows", "experts", "cols"), [(1, 5, 96), (8, 12, 64)])
@pytest.mark.parametrize("biased", [False, True])
def test_norm_and_router(rows: int, experts: int, cols: int, biased: bool) -> None:
    x, extra, weight, router = normal(rows, cols), normal(rows, cols), normal(cols), normal(experts, cols)
    bias = normal(experts, seed=6) if biased else torch.zeros(experts)
    live = max(1, rows - 1)
    mine, y = x.to(DEVICE), guarded(rows, cols)
    logits = torch.full((rows, experts), GUARD, device=DEVICE)
    norm_router(
        mine, extra.to(DEVICE), counter(live), weight.to(DEVICE), EPS, router.to(DEVICE), y.x, y.codes, y.scales,
        logits,
        bias=bias.to(DEVICE) if biased else None,
    )  # fmt: skip
    expected = norm(x.double() + extra, weight, EPS)
    assert torch.equal(mine.cpu(), x)
    check_norm(y, expected[:live], live)
    assert nmse(logits[:live].cpu(), expected[:live] @ router.double().T + bias) < 1e-12
    assert (logits[live:] == GUARD).all()


def test_routing_of_a_nan_stays_in_range() -> None:
    ids = torch.empty(1, 2, dtype=torch.int32, device=DEVICE)
    logits = torch.tensor([[1.0, float("nan"), 2.0]], device=DEVICE)
    route(logits, None, counter(1), ids, None, torch.empty(1, 2, device=DEVICE), None)
    assert ((ids >= 0) & (ids < 3)).all()


def test_streamed_routes() -> None:
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, 7, (90, 3), generator=g).int()
    places = torch.randint(-1, 2, (91, 3), generator=g).int()
    expert_map = torch.tensor([-1, 3, -1, 0, 1, -1, 2]).int()
    taken, found = torch.full((91, 3), 77).int().to(DEVICE), places.to(DEVICE)
    select_streamed_routes(ids.to(DEVICE), expert_map.to(DEVICE), taken[:-1], found[:-1])
    expected = reference_select(ids, expert_map, places[:-1])
    assert torch.equal(taken[:-1].cpu(), expected[0])
    assert torch.equal(found[:-1].cpu(), expected[1])
    assert (taken[-1] == 77).all()
    assert torch.equal(found[-1].cpu(), places[-1])
    wide = [torch.full((91, 5), 77, dtype=torch.int32, device=DEVICE) for _ in range(3)]
    for columns, values in zip(wide, (ids, torch.full_like(ids, 77), places), strict=True):
        columns[: len(values), :3] = values.to(DEVICE)
    select_streamed_routes(wide[0][:90, :3], expert_map.to(DEVICE), wide[1][:90, :3], wide[2][:90, :3])
    for columns, values in zip(wide[1:], (taken, found), strict=True):
        assert torch.equal(columns[:90, :3], values[:90])
        assert (columns[:, 3:] == 77).all()
