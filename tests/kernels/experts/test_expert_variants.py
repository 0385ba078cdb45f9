"""Experts with biases and with gpt-oss's activation; a shared expert and a dense feed-forward as one expert."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type
from torch import Tensor

from moeserve.kernels.experts.reference import activate, shared_gate
from tests.kernels.experts.expert_layer import COMPUTED, EXPERTS, FF, HIDDEN, Layer, routing
from tests.kernels.operations import COSTLY_ISAS, ISAS, head, load, run_experts, run_shared_gate, stream_of
from tests.kernels.weights import Weights, activations, nmse
from tests.support.nightly import nightly_after

each_isa = pytest.mark.parametrize("isa", ISAS)
each_vector_isa = pytest.mark.parametrize("isa", COSTLY_ISAS)
KINDS = [
    (Type.Q4_K, Type.Q4_K, Type.Q6_K),
    (Type.MXFP4, Type.MXFP4, Type.MXFP4),
    (Type.F16, Type.Q8_0, Type.BF16),
]


def biases(num: int = EXPERTS, hidden: int = HIDDEN, ff: int = FF) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(7)
    return {
        "gate_bias": torch.randn(num, ff, generator=g),
        "up_bias": torch.randn(num, ff, generator=g),
        "down_bias": torch.randn(num, hidden, generator=g),
    }


OPTIONS: list[dict[str, Any]] = [
    {"activation": "gelu"},
    {"activation": "swiglu_oai", "limit": 1.5, "alpha": 1.3},
    {"activation": "situ", "limit": 25.0, "alpha": 4.0},
    {"activation": "situ", "alpha": 4.0},
    {"limit": 0.5},
    {"activation": "clamped_silu", "limit": 0.5},
    {"weighs_input": True},
    {"activation": "swiglu_oai"},
    {"activation": "swiglu_oai", **biases()},
    biases(),
    *({name: bias} for name, bias in biases().items()),
]


@each_vector_isa
@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: "-".join(kind.name for kind in kinds))
@pytest.mark.parametrize("options", nightly_after(8, OPTIONS), ids=lambda o: "+".join(o))
@pytest.mark.parametrize("n", nightly_after(1, [9, 300]))
def test_against_the_reference(
    kinds: tuple[Type, Type, Type], options: dict[str, Any], n: int, isa: str
) -> None:
    """Both ways through the last product: up to 512 routes and more."""
    layer, y = Layer.random(*kinds), activations("heavy-tailed", n, HIDDEN) * 4
    out = layer.run(stream_of(isa), y, *routing(n), **options)
    assert nmse(out, layer.expected(y, *routing(n), **options)) <= COMPUTED


@each_isa
def test_the_activation_clamps(isa: str) -> None:
    """One expert of float32 unit matrices: the layer is the activation itself, over its whole range. exp's argument of
    up to 170 is known to 1e-5 in float32."""
    unit = Weights(Type.F32, torch.eye(64).numpy().view("uint8")[None], 64)
    eye = Layer(unit, unit, unit)
    y = torch.linspace(-100, 100, 64 * 40).view(40, 64)
    ids, ones = torch.zeros(40, 1, dtype=torch.int32), torch.ones(40, 1)
    out = eye.run(stream_of(isa), y, ids, ones, activation="swiglu_oai")
    expected = activate(y.double(), y.double(), "swiglu_oai")
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-12)
    assert expected.max() == expected[-1, -1]
    assert expected[-1, -1].item() == pytest.approx(8 * 7, rel=1e-4)
    broken = eye.run(
        stream_of(isa), torch.full((1, 64), float("nan")), ids[:1], ones[:1], activation="swiglu_oai"
    )
    assert broken.isnan().all()


@each_isa
@pytest.mark.parametrize("limit", [25.0, None])
def test_the_two_hyperbolic_tangents(isa: str, limit: float | None) -> None:
    """Over the whole range, and near 0, where the difference of two numbers near 1 would lose digits."""
    unit = Weights(Type.F32, torch.eye(64).numpy().view("uint8")[None], 64)
    eye = Layer(unit, unit, unit)
    y = torch.cat([torch.linspace(-150, 150, 64 * 20), torch.linspace(-1e-2, 1e-2, 64 * 20)]).view(40, 64)
    ids, ones = torch.zeros(40, 1, dtype=torch.int32), torch.ones(40, 1)
    options: dict[str, Any] = {"activation": "situ", "alpha": 4.0, "limit": limit}
    out = eye.run(stream_of(isa), y, ids, ones, **options)
    # exp's argument of up to 150 is known to 1e-5; below -87 exp gives 0, and so does the sigmoid.
    expected = activate(y.double(), y.double(), **options)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-33)
    broken = eye.run(stream_of(isa), torch.full((1, 64), float("nan")), ids[:1], ones[:1], **options)
    assert broken.isnan().all()


def test_limits_and_weights_that_do_not_fit_are_refused() -> None:
    layer, y = Layer.random(Type.F32, Type.F32, Type.F32), activations("gaussian", 2, HIDDEN)
    for options in (
        {"activation": "gelu", "limit": 1.0},
        {"activation": "swiglu_oai", "limit": 0.0},
        {"limit": float("nan")},
        {"limit": -1.0},
        {"activation": "situ", "limit": -1.0},
    ):
        with pytest.raises(ValueError, match=r"^limit"):
            layer.run(stream_of("plain"), y, *routing(2), **options)
    for alpha in (0.0, float("nan")):
        with pytest.raises(ValueError, match=r"^alpha"):
            layer.run(stream_of("plain"), y, *routing(2), activation="situ", alpha=alpha)
    with pytest.raises(ValueError, match=r"^weighs_input"):
        layer.run(stream_of("plain"), y, *routing(2), weighs_input=True, **biases())


@each_isa
def test_batch_and_threads_do_not_change_a_bit(isa: str) -> None:
    layer = Layer.random(Type.Q4_K, Type.Q5_K, Type.Q6_K)
    options: dict[str, Any] = {"activation": "swiglu_oai", **biases()}
    y, (ids, weights) = load(activations("gaussian", 300, HIDDEN)), routing(300)
    for threads in (1, 3):
        stream = stream_of(isa, threads)
        matrices = (layer.gate.pack(stream), layer.up.pack(stream), layer.down.pack(stream))
        whole = run_experts(stream, y, matrices, ids, weights, **options)
        if threads == 1:
            first = whole
        assert torch.equal(whole, first)
        for n in (1, 2, 9, 64, 256):
            part = run_experts(stream, head(y, n), matrices, ids[:n], weights[:n], **options)
            assert torch.equal(part, whole[:n])


def test_nothing_is_counted_where_nobody_counts() -> None:
    layer, y = Layer.random(Type.Q8_0, Type.Q8_0, Type.Q8_0), activations("gaussian", 9, HIDDEN)
    counted = layer.run(stream_of("plain"), y, *routing(9))
    assert torch.equal(layer.run(stream_of("plain"), y, *routing(9), counted=False), counted)


@each_isa
@pytest.mark.parametrize("gated", [False, True])
def test_a_shared_expert(isa: str, gated: bool) -> None:
    """One expert that every token has, weighted by its gate or, as a dense feed-forward, by 1."""
    layer = Layer.random(Type.Q4_K, Type.Q4_K, Type.Q6_K, num=1)
    stream, y = stream_of(isa, 3), activations("gaussian", 600, HIDDEN)
    gate = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(2)) / 8 if gated else None
    routes = run_shared_gate(stream, load(y), gate)
    expected = shared_gate(y, gate)
    assert not routes.ids.any()
    torch.testing.assert_close(routes.weights.double(), expected, rtol=1e-5, atol=1e-7)
    matrices = (layer.gate.pack(stream), layer.up.pack(stream), layer.down.pack(stream))
    for n in (1, 65, 600):
        ids, weights = routes.ids[:n], routes.weights[:n]
        out = run_experts(stream, head(load(y), n), matrices, ids, weights, counted=False)
        assert nmse(out, layer.expected(y[:n], ids, weights)) <= COMPUTED
        if n == 1:
            alone = out
        assert torch.equal(out[:1], alone)


@each_isa
def test_the_shared_gate_in_any_batch_and_on_any_threads(isa: str) -> None:
    y, gate = load(activations("heavy-tailed", 33, HIDDEN)), torch.randn(HIDDEN)
    whole = run_shared_gate(stream_of(isa, 1), y, gate).weights
    for n, threads in ((1, 2), (8, 3), (33, 3)):
        assert torch.equal(run_shared_gate(stream_of(isa, threads), head(y, n), gate).weights, whole[:n])


def test_a_shared_gate_saturates_without_nan() -> None:
    y = torch.tensor([[1.0] * 32, [-1.0] * 32])
    weights = run_shared_gate(stream_of("plain"), load(y), torch.full((32,), 1e3)).weights
    assert weights.tolist() == [[1.0], [0.0]]
