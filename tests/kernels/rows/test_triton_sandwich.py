"""What layers with post-norms ask of Triton's kernels beside the others', against the references."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_device import DEVICE, counter, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.attention.new_tokens import NewTokens
from moeserve.kernels.attention.op import decode_attention
from moeserve.kernels.attention.reference import Sequence, attention
from moeserve.kernels.attention.workspace import DecodeWorkspace
from moeserve.kernels.delta_net.op import sigmoid_gate
from moeserve.kernels.linear.softcap import softcap
from moeserve.kernels.norm.op import add_norm, norm_in_place, sandwich_inputs, sandwich_sum
from moeserve.kernels.norm.reference import norm
from moeserve.kernels.norm.reference import sandwich_sum as reference_sum
from moeserve.kernels.norm.sandwich_norms import PartNorms, SandwichNorms
from moeserve.kernels.rope.op import rope_store
from moeserve.kernels.rope.reference import rope_store as rope_reference
from moeserve.kernels.routing.op import route
from moeserve.kernels.routing.reference import route as route_reference
from tests.kernels.rows.triton_rows import EPS, GUARD, check_norm, guarded, normal
from tests.kernels.weights import nmse

COLS = 96


def norms_of(seed: int) -> list[torch.Tensor]:
    """Norms of attention's output, of the inputs of the dense feed-forward, the router and the experts, of the outputs
    of the two feed-forwards and of their sum; then the factor."""
    return [*normal(7, COLS, seed=seed), torch.tensor([0.7])]


def sandwich(norms: list[torch.Tensor]) -> SandwichNorms:
    attended, dense, router, experts, of_dense, of_experts, output, factor = (w.to(DEVICE) for w in norms)
    return SandwichNorms(attended, dense, output, PartNorms(router, experts, of_dense, of_experts), factor)


def test_the_inputs_of_both_feed_forwards_and_of_the_router() -> None:
    x, attended, norms = normal(4, COLS), normal(4, COLS, seed=1), norms_of(2)
    mine, outputs = x.clone().to(DEVICE), [guarded(4, COLS) for _ in range(3)]
    router = outputs[1].x
    assert router is not None
    sandwich_inputs(
        mine, attended.to(DEVICE), sandwich(norms), counter(3), EPS,
        outputs[0], router, outputs[2],
    )  # fmt: skip
    expected = x.double() + norm(attended, norms[0], EPS)
    assert nmse(mine[:3].cpu(), expected[:3]) < 1e-12
    assert torch.equal(mine[3].cpu(), x[3])
    check_norm(outputs[0], norm(expected[:3], norms[1], EPS), 3)
    check_norm(outputs[2], norm(expected[:3], norms[3], EPS), 3)
    assert nmse(router[:3].cpu(), norm(expected[:3], norms[2], EPS)) < 1e-12
    assert (router[3] == GUARD).all()


@pytest.mark.parametrize("rows", [None, [2, 0]])
def test_the_sum_of_both(rows: list[int] | None) -> None:
    """Parts beside the dense one's, in one tensor, and what the pool adds; of chosen rows x stays as it was."""
    x, parts, extra = normal(4, COLS), normal(4, 3, COLS, seed=1), normal(4, COLS, seed=3)
    norms, weight = norms_of(2), normal(COLS, seed=4)
    weights, ids = normal(4, 3, seed=5), torch.tensor([[0, -1, 0], [1, 1, 0], [-1, -1, 0], [0, 0, 0]])
    there = (ids >= 0)[:, :2, None].double()
    experts = extra + (parts[:, :2] * weights[:, :2, None] * there).sum(1)
    expected = reference_sum(x, parts[:, 2], experts, *norms[4:7], norms[7], EPS)
    mine, all_parts, live = x.clone().to(DEVICE), parts.to(DEVICE), 3 if rows is None else 2
    y = guarded(4 if rows is None else 2, COLS)
    sandwich_sum(
        mine, all_parts[:, 2:], all_parts[:, :2], weights.to(DEVICE)[:, :2], ints(ids)[:, :2], extra.to(DEVICE),
        None if rows is None else ints(rows), counter(live), sandwich(norms),
        weight.to(DEVICE), EPS, y,
    )  # fmt: skip
    chosen = list(range(3)) if rows is None else rows
    check_norm(y, norm(expected[chosen], weight, EPS), live)
    assert nmse(mine[:3].cpu(), (expected if rows is None else x)[:3]) < 1e-12


def test_the_sum_of_what_the_pool_has_alone() -> None:
    x, dense, extra = (normal(2, COLS, seed=i) for i in (0, 1, 3))
    norms, weight, y = norms_of(2), normal(COLS, seed=4), guarded(2, COLS)
    sandwich_sum(
        x.clone().to(DEVICE), dense[:, None].to(DEVICE), None, None, None, extra.to(DEVICE), None, counter(2),
        sandwich(norms), weight.to(DEVICE), EPS, y,
    )  # fmt: skip
    check_norm(y, norm(reference_sum(x, dense, extra, *norms[4:7], norms[7], EPS), weight, EPS), 2)


@pytest.mark.parametrize(("factor", "post_norm_eps"), [(None, 0.3), (0.7, None)])
def test_blocks_without_normalised_parts(factor: float | None, post_norm_eps: float | None) -> None:
    """The feed-forward's input, with the router's the same in float32; then what it adds, as the sum of its parts."""
    post_eps = EPS if post_norm_eps is None else post_norm_eps
    x, attended, parts = normal(2, COLS), normal(2, COLS, seed=1), normal(2, 2, COLS, seed=2)
    weights = normal(4, COLS, seed=3)
    mine, y, exact = x.clone().to(DEVICE), guarded(2, COLS), torch.empty(2, COLS, device=DEVICE)
    scale = None if factor is None else torch.tensor([factor], device=DEVICE)
    norms = SandwichNorms(*(w.to(DEVICE) for w in weights[:3]), factor=scale, post_norm_eps=post_norm_eps)
    sandwich_inputs(mine, attended.to(DEVICE), norms, counter(2), EPS, y, exact, None)
    expected = x.double() + norm(attended, weights[0], post_eps)
    check_norm(y, norm(expected, weights[1], EPS), 2)
    assert nmse(exact.cpu(), norm(expected, weights[1], EPS)) < 1e-12
    sandwich_sum(
        mine, None, parts.to(DEVICE), None, None, None, None, counter(2), norms, weights[3].to(DEVICE), EPS, y
    )
    expected = (expected + norm(parts.sum(1), weights[2], post_eps)) * (factor or 1.0)
    check_norm(y, norm(expected, weights[3], EPS), 2)
    assert nmse(mine.cpu(), expected) < 1e-12


def test_rows_that_are_normalised_in_place() -> None:
    """The first two of three rows count."""
    x = normal(3, COLS)
    mine = x.clone().to(DEVICE)
    norm_in_place(mine, torch.ones(COLS, device=DEVICE), counter(2), EPS)
    assert nmse(mine[:2].cpu(), norm(x[:2], torch.ones(COLS), EPS)) < 1e-12
    assert torch.equal(mine[2].cpu(), x[2])


@pytest.mark.parametrize("rows", [None, [1, 0]])
def test_blocks_that_read_the_residual_itself(rows: list[int] | None) -> None:
    """Without norms before blocks: the first block's input, the feed-forward's, and the next layer's."""
    x, attended, parts = normal(2, COLS), normal(2, COLS, seed=1), normal(2, 2, COLS, seed=2)
    weights, chosen = normal(2, COLS, seed=3), [0, 1] if rows is None else rows
    mine, y, exact = x.clone().to(DEVICE), guarded(2, COLS), torch.empty(2, COLS, device=DEVICE)
    of_rows = None if rows is None else ints(rows)
    add_norm(mine, None, None, None, None, of_rows, counter(2), None, EPS, y.x, y.codes, y.scales, exact)
    check_norm(y, norm(x, None, EPS)[chosen], 2)
    assert torch.equal(exact.cpu(), x[chosen])
    norms = SandwichNorms(weights[0].to(DEVICE), None, weights[1].to(DEVICE))
    sandwich_inputs(mine, attended.to(DEVICE), norms, counter(2), EPS, y, exact, None)
    expected = x.double() + norm(attended, weights[0], EPS)
    check_norm(y, expected, 2)
    assert nmse(exact.cpu(), expected) < 1e-12
    sandwich_sum(mine, None, parts.to(DEVICE), None, None, None, of_rows, counter(2), norms, None, EPS, y)
    check_norm(y, (expected + norm(parts.sum(1), weights[1], EPS))[chosen], 2)


@pytest.mark.parametrize("softplus", [False, True])
def test_a_gate_of_a_head(softplus: bool) -> None:
    x, gate, n = normal(3, 4 * 32), normal(3, 4, seed=1) * 20, 2
    mine = x.clone().to(DEVICE)
    sigmoid_gate(mine, gate.to(DEVICE), 32, counter(n), None, None, softplus=softplus)
    factor = torch.nn.functional.softplus(gate.double()) if softplus else gate.double().sigmoid()
    expected = (x.double().view(3, 4, 32) * factor[:, :, None]).flatten(1)
    assert nmse(mine[:n].cpu(), expected[:n]) < 1e-12
    assert torch.equal(mine[n:].cpu(), x[n:])


@pytest.mark.parametrize("is_new", [False, True])
def test_v_is_normalised_and_may_be_made_from_k(is_new: bool) -> None:
    """Behind the product, as rope_store does it and as decode attention does of a new token."""
    n, heads, kv_heads, dim = 2, 2, 1, 32
    q, k = normal(n, heads * dim), normal(n, kv_heads * dim, seed=1)
    weights, angles = (
        normal(2, dim, seed=2),
        torch.rand(3, dim // 2, generator=torch.Generator().manual_seed(3)),
    )
    slots, keys = torch.tensor([3, 1]), torch.zeros(5, kv_heads, dim, dtype=torch.float16)
    values, k_heads = keys.clone(), k.unflatten(1, (kv_heads, dim))
    positions = torch.tensor([0, 0])
    rotated = rope_reference(
        q.unflatten(1, (heads, dim)), k_heads, k_heads, *weights, EPS, angles.cos()[positions],
        angles.sin()[positions], slots, keys, values, v_eps=EPS,
    )  # fmt: skip
    assert nmse(values[slots].double(), norm(k_heads, torch.ones(dim), EPS)) < 1e-6
    mine_k, mine_v = torch.zeros_like(keys, device=DEVICE), torch.zeros_like(values, device=DEVICE)
    to_norms = (*weights.to(DEVICE), EPS, angles.cos().to(DEVICE), angles.sin().to(DEVICE))
    mine = k.to(DEVICE)
    if is_new:
        table, out = ints([[3], [1]]), torch.empty(n, heads * dim, device=DEVICE)
        room = DecodeWorkspace(n, heads, kv_heads, dim, DEVICE, 1)
        new = NewTokens(mine, mine, *to_norms, ints(slots), v_eps=EPS)
        decode_attention(
            q.to(DEVICE), new, mine_k, mine_v, table, ints([0, 1]), ints(positions), counter(n), room, out, None, None,
        )  # fmt: skip
        sequences = [Sequence(i, 1, 0, slot) for i, slot in enumerate(slots[:, None].int())]
        assert nmse(out.cpu(), attention(rotated, keys, values, sequences)) < 1e-6
    else:
        rope_store(
            q.to(DEVICE), mine, mine, *to_norms, ints(positions), ints(slots), counter(n),
            torch.empty(n, heads, dim, device=DEVICE), mine_k, mine_v, v_eps=EPS,
        )  # fmt: skip
    assert nmse(mine_k.cpu().double(), keys.double()) < 1e-6
    assert nmse(mine_v.cpu().double(), values.double()) < 1e-6


def test_experts_weights_are_scaled_by_their_own_numbers() -> None:
    logits, scale = normal(3, 5), torch.rand(5) + 0.5
    ids, weights = torch.empty(3, 2, dtype=torch.int32, device=DEVICE), torch.empty(3, 2, device=DEVICE)
    route(logits.to(DEVICE), None, counter(3), ids, None, weights, None, expert_scale=scale.to(DEVICE))
    expected = route_reference(logits, 2, expert_scale=scale)
    assert torch.equal(ids.cpu(), expected[0])
    assert torch.allclose(weights.cpu().double(), expected[1], rtol=1e-5)


def test_softcap() -> None:
    x = torch.cat([torch.linspace(-400, 400, 900), torch.tensor([1e-3, 0.0, 1e30, -1e30])])
    found = x.clone().to(DEVICE)
    softcap(found, 30.0)
    assert torch.allclose(found.cpu().double(), 30 * torch.tanh(x.double() / 30), rtol=1e-6, atol=1e-5)
