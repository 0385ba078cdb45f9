"""What layers with norms behind their blocks ask of the CPU pool beside the others' operations."""

from __future__ import annotations

import pytest
import torch

from moeserve.kernels.experts.reference import activate
from moeserve.kernels.norm.reference import norm
from moeserve.kernels.routing.reference import route
from moeserve.kernels.stream_operands import Activations, Heads, KvLayer, RoutingWorkspace
from tests.kernels.operations import ISAS, guarded, stream_of, unguard
from tests.kernels.weights import nmse

N, COLS, EPS = 5, 96, 1e-6


@pytest.mark.parametrize("isa", ISAS)
def test_add_norm(isa: str) -> None:
    source, weight, x = torch.randn(N, COLS), torch.randn(COLS), torch.randn(N, COLS)
    found = guarded(N, COLS)
    found[:N] = x
    stream = stream_of(isa)
    stream.add_norm(source, weight, EPS, N, found, factor=0.5)
    stream.wait()
    assert nmse(unguard(found), (x.double() + norm(source, weight, EPS)) * 0.5) < 1e-12
    with pytest.raises(ValueError, match=r"^weight"):
        stream.add_norm(source, weight[:-16], EPS, N, x)


@pytest.mark.parametrize("isa", ISAS)
def test_a_block_reads_the_residual_itself(isa: str) -> None:
    """What a layer without norms before its blocks launches in the place of a norm."""
    x, y, normed = torch.randn(N, COLS), Activations(N, COLS), Activations(N, COLS)
    stream = stream_of(isa)
    stream.gelu_gate(None, x, 0, N, y)
    stream.norm(x, torch.ones(COLS), EPS, N, normed)
    stream.wait()
    assert torch.equal(y.f32.double(), norm(x, None, EPS))
    assert not torch.equal(y.f32, normed.f32)


@pytest.mark.parametrize("isa", ISAS)
def test_softcap(isa: str) -> None:
    x = torch.cat([torch.linspace(-400, 400, 9000), torch.tensor([1e-3, 0.0, 1e30, -1e30])])
    x = torch.cat([x, torch.zeros(-len(x) % 16)])[None]
    stream, found = stream_of(isa), x.clone()
    stream.softcap(found, 1, 30.0)
    stream.wait()
    assert torch.allclose(found.double(), 30 * torch.tanh(x.double() / 30), rtol=1e-6, atol=1e-5)
    with pytest.raises(ValueError, match=r"^cap"):
        stream.softcap(found, 1, 0.0)


@pytest.mark.parametrize("isa", ISAS)
def test_v_is_normalised_and_may_be_made_from_k(isa: str) -> None:
    heads, slots = Heads(2, 1, 32), torch.tensor([3, 0, 4, 1, 2], dtype=torch.int32)
    angle = torch.randn(N, 16)
    for from_k in (False, True):
        q, k, v = torch.randn(N, 64), torch.randn(N, 32), torch.randn(N, 32)
        expected = norm(k if from_k else v, torch.ones(32), EPS)
        kv = KvLayer(*(torch.zeros(6, 1, 32, dtype=torch.float16) for _ in range(2)))
        stream = stream_of(isa)
        stream.rope_store(
            q, k, v, None, torch.ones(32), EPS, angle.cos(), angle.sin(), slots, kv, N, heads,
            scale=1.0, v_norm=torch.ones(32), v_from_k=from_k,
        )  # fmt: skip
        stream.wait()
        assert nmse(kv.values[slots.long(), 0].double(), expected) < 1e-6
    with pytest.raises(ValueError, match=r"^v_norm"):
        stream.rope_store(
            q, k, v, None, None, EPS, angle.cos(), angle.sin(), slots, kv, N, heads, v_from_k=True
        )


def test_experts_weights_are_scaled_by_their_own_numbers() -> None:
    logits, scale, stream = torch.randn(N, 8), torch.rand(8) + 0.5, stream_of(ISAS[-1])
    workspace = RoutingWorkspace(N, 8, 3)
    stream.route(logits, N, workspace, expert_scale=scale)
    stream.wait()
    ids, weights = route(logits, 3, expert_scale=scale)
    assert torch.equal(workspace.ids, ids)
    assert torch.allclose(workspace.weights.double(), weights, atol=1e-6)


def test_gelu_is_its_tanh_form() -> None:
    gate = torch.linspace(-9, 9, 101, dtype=torch.float64)
    tanh = 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
    assert torch.allclose(activate(gate, torch.full_like(gate, 2.0), "gelu"), 2 * tanh)
