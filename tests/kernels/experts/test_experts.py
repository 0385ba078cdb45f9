"""The routed experts: the layout, every mix of types, every pattern of routing, the truth, and any batch."""

from __future__ import annotations

import itertools
from functools import lru_cache

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type
from torch import Tensor

from moeserve.models.loading.cpu_weights import GatedExperts
from tests.kernels.experts.expert_layer import COMPUTED, EXPERTS, HIDDEN, Layer, routing
from tests.kernels.operations import COSTLY_ISAS, ISAS, head, load, run_experts, stream_of
from tests.kernels.weights import ACTIVATIONS, TYPES, activations, nmse

each_isa = pytest.mark.parametrize("isa", ISAS)
each_vector_isa = pytest.mark.parametrize("isa", COSTLY_ISAS)


@lru_cache(maxsize=1)
def layer_of(kind: Type) -> Layer:
    return Layer.random(kind, kind, kind)


@pytest.mark.parametrize("isa", COSTLY_ISAS)
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_layout_and_arithmetic(kind: Type, isa: str) -> None:
    layer, y = layer_of(kind), activations("gaussian", 9, HIDDEN)
    out = layer.run(stream_of(isa), y, *routing(9))
    assert nmse(out, layer.expected(y, *routing(9))) <= COMPUTED


# Measured, over all integer types: 1.2 to 1.6e-4, 2.2 to 2.7e-4, 3.7 to 4.3e-4. Floats: 3.6e-13.
EXPERT_GATES = {"gaussian": 1.8e-4, "heavy-tailed": 3e-4, "outlier channels": 4.8e-4}


@lru_cache(maxsize=1)
def true_outputs(kind: Type) -> dict[str, Tensor]:
    """By distribution of the activations."""
    layer = layer_of(kind)
    return {
        name: layer.expected(activations(name, 65, HIDDEN), *routing(65), truth=True) for name in ACTIVATIONS
    }


@pytest.mark.parametrize("isa", COSTLY_ISAS)
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_distance_from_the_truth(kind: Type, isa: str) -> None:
    layer = layer_of(kind)
    for distribution, truth in true_outputs(kind).items():
        out = layer.run(stream_of(isa), activations(distribution, 65, HIDDEN), *routing(65))
        gate = EXPERT_GATES[distribution] if layer.gate.integer else 1e-12
        assert nmse(out, truth) <= gate, distribution


@each_isa
@pytest.mark.parametrize(
    "kinds",
    [
        (Type.Q4_K, Type.Q4_K, Type.Q6_K),  # llama.cpp's Q4_K_M
        (Type.Q4_K, Type.Q8_0, Type.Q5_1),
        (Type.BF16, Type.Q4_K, Type.Q6_K),  # gate and up want other activations
        (Type.Q4_K, Type.Q5_K, Type.F16),  # float down: the intermediate stays float32
        (Type.F32, Type.F16, Type.BF16),
        (Type.IQ4_XS, Type.IQ4_NL, Type.F32),
    ],
    ids=lambda kinds: "-".join(kind.name for kind in kinds),
)
def test_mixed_types(kinds: tuple[Type, Type, Type], isa: str) -> None:
    layer, y = Layer.random(*kinds), activations("gaussian", 9, HIDDEN)
    out = layer.run(stream_of(isa), y, *routing(9))
    assert nmse(out, layer.expected(y, *routing(9))) <= COMPUTED


@each_isa
@pytest.mark.parametrize(
    ("hidden", "ff", "num", "top_k"), [(96, 160, 7, 3), (32, 64, 1, 1), (64, 32, 130, 8), (160, 96, 2, 2)]
)
def test_odd_shapes(hidden: int, ff: int, num: int, top_k: int, isa: str) -> None:
    layer = Layer.random(Type.Q8_0, Type.Q4_0, Type.Q5_1, hidden, ff, num)
    y, routes = activations("gaussian", 33, hidden), routing(33, num, top_k)
    assert nmse(layer.run(stream_of(isa), y, *routes), layer.expected(y, *routes)) <= COMPUTED


def all_to_one(n: int) -> tuple[Tensor, Tensor]:
    return torch.full((n, 1), 3, dtype=torch.int32), torch.ones(n, 1)


def every_expert(n: int) -> tuple[Tensor, Tensor]:
    return torch.arange(EXPERTS, dtype=torch.int32).flip(0).repeat(n, 1), torch.rand(n, EXPERTS)


def some_weights_zero(n: int) -> tuple[Tensor, Tensor]:
    ids, weights = routing(n)
    weights[::2, 0] = 0.0
    weights[1] = 0.0
    return ids, weights


@each_vector_isa
@pytest.mark.parametrize("pattern", [all_to_one, every_expert, some_weights_zero, routing])
@pytest.mark.parametrize("n", [2, 64, 65, 150])
def test_routing_patterns(pattern: object, n: int, isa: str) -> None:
    """Tiles of 64 rows filled exactly, overfilled, unused experts between used ones."""
    assert callable(pattern)
    layer, y, routes = (
        Layer.random(Type.Q4_K, Type.Q4_K, Type.Q6_K),
        activations("gaussian", n, HIDDEN),
        pattern(n),
    )
    out = layer.run(stream_of(isa), y, *routes)
    assert nmse(out, layer.expected(y, *routes)) <= COMPUTED
    assert torch.equal(
        out[(routes[1] == 0).all(dim=1)], torch.zeros(0 if pattern is not some_weights_zero else 1, HIDDEN)
    )


@each_isa
def test_the_result_is_added_to_the_residual(isa: str) -> None:
    stream, layer, y = (
        stream_of(isa),
        Layer.random(Type.Q8_0, Type.Q8_0, Type.Q8_0),
        activations("gaussian", 5, HIDDEN),
    )
    matrices = (layer.gate.pack(stream), layer.up.pack(stream), layer.down.pack(stream))
    residual = activations("heavy-tailed", 5, HIDDEN)
    added = run_experts(stream, load(y), matrices, *routing(5), residual)
    assert torch.equal(added, residual + run_experts(stream, load(y), matrices, *routing(5)))


@each_isa
def test_batch_and_threads_do_not_change_a_bit(isa: str) -> None:
    """Alone, in any crowd, and whatever the order of a token's experts, a token's result is the same."""
    layer = Layer.random(Type.Q4_K, Type.Q5_K, Type.Q6_K)
    y, (ids, weights) = activations("gaussian", 65, HIDDEN), routing(65, top_k=3)
    loaded = load(y)
    for threads in (1, 2, 3):
        stream = stream_of(isa, threads)
        matrices = (layer.gate.pack(stream), layer.up.pack(stream), layer.down.pack(stream))
        whole = run_experts(stream, loaded, matrices, ids, weights)
        if threads == 1:
            first = whole
        assert torch.equal(whole, first)
        for n in (*range(1, 10), 64):
            assert torch.equal(
                run_experts(stream, head(loaded, n), matrices, ids[:n], weights[:n]), whole[:n]
            )
        for order in itertools.permutations(range(3)):
            chosen = list(order)
            assert torch.equal(
                run_experts(stream, loaded, matrices, ids[:, chosen], weights[:, chosen]), whole
            )


@each_isa
def test_few_routes_and_many_give_the_same_bits(isa: str) -> None:
    """Up to 512 routes a layer's last product is shared among the threads in another way."""
    layer, n = Layer.random(Type.Q4_K, Type.Q4_K, Type.Q6_K), 200
    y, (ids, weights) = load(activations("gaussian", n, HIDDEN)), routing(n, top_k=3)
    stream = stream_of(isa, 3)
    matrices = (layer.gate.pack(stream), layer.up.pack(stream), layer.down.pack(stream))
    whole = run_experts(stream, y, matrices, ids, weights)
    assert torch.equal(run_experts(stream, head(y, 170), matrices, ids[:170], weights[:170]), whole[:170])


@each_isa
@pytest.mark.parametrize("kinds", [(Type.Q4_K, Type.Q6_K), (Type.F16, Type.F16)], ids=["q4_k", "f16"])
def test_without_a_gate_the_product_is_computed_once(kinds: tuple[Type, Type], isa: str) -> None:
    """One matrix for gate and up gives the bits of two that are equal, and counts once in the bytes of an expert."""
    random, stream = Layer.random(kinds[0], *kinds), stream_of(isa)
    layer, y = Layer(random.up, random.up, random.down), activations("gaussian", 9, HIDDEN)
    up, down = layer.up.pack(stream), layer.down.pack(stream)
    out = run_experts(stream, load(y), (up, up, down), *routing(9), activation="relu")
    assert torch.equal(out, layer.run(stream, y, *routing(9), activation="relu"))
    assert nmse(out, layer.expected(y, *routing(9), activation="relu")) <= COMPUTED
    assert GatedExperts(up, up, down).bytes_each == (up.bytes + down.bytes) // EXPERTS
