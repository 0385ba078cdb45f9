"""The CPU's side of the hand-off, with the test in place of the GPU: flags, subsets, order, errors, the watchdog."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from tests.kernels.experts.handoff_world import (  # isort: skip  (first: it sets up the interpreter)
    EXPERTS,
    FF,
    HERE,
    HIDDEN,
    MAX_TOKENS,
    TOP_K,
    HandGpu,
    Layer,
    alone,
    local_routes,
    rows,
)
import torch

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.gating import Activation
from moeserve.kernels.handoff import CpuExperts, ExpertHandoff, HandoffError
from tests.kernels.operations import load, run_experts
from tests.kernels.weights import activations
from tests.support.servers.idle import comes_to_rest


@pytest.fixture(params=[1, 2, 5], ids=lambda n: f"{n} threads")
def stream(request: pytest.FixtureRequest) -> CpuStream:
    return CpuStream(request.param)


def handoff(stream: CpuStream, *layers: Layer | None, **options: float) -> ExpertHandoff:
    experts = [None if layer is None else layer.experts for layer in layers]
    return ExpertHandoff(stream, experts, MAX_TOKENS, HIDDEN, TOP_K, "cpu", **options)


def test_steps_are_answered_layer_by_layer(stream: CpuStream) -> None:
    """A layer without CPU experts between two with; two steps announced at once, of different sizes."""
    layers = [Layer.random(stream), None, Layer.random(stream, seed=10), Layer.random(stream, seed=20)]
    h = handoff(stream, *layers)
    gpu = HandGpu(h)
    expert_token_counts = torch.zeros(2, len(HERE), dtype=torch.int64)
    h.begin()
    h.begin()
    got, expected = [], []
    for step, n in ((1, 5), (2, MAX_TOKENS)):
        for i, layer in enumerate(layers):
            if layer is None:
                continue
            x, (ids, weights) = activations("gaussian", n, HIDDEN, seed=i), local_routes(n, seed=i + step)
            gpu.publish(i, step, x, ids, weights)
            gpu.wait(i)
            got.append(gpu.result(i, n).clone())
            expected.append((layer, x, ids, weights))
            if i == 2:
                counts = torch.bincount(ids[ids >= 0].flatten(), minlength=len(HERE))
                expert_token_counts += torch.stack([counts, (counts > 0).long()])
    stream.wait()
    h.check()
    assert torch.equal(h.expert_token_counts(2), expert_token_counts)
    assert h.expert_reads(np.array([False, False, True, False])) == expert_token_counts[1].sum()
    reads = [h.expert_token_counts(layer)[1].sum() for layer in (0, 3)]
    assert h.expert_reads(np.array([True, True, False, True])) == sum(reads) > 0
    with pytest.raises(ValueError, match="one entry for each layer"):
        h.expert_reads(np.ones(3, np.bool_))
    for out, case in zip(got, expected, strict=True):
        assert torch.equal(out, alone(stream, *case))
    h.close()


@pytest.mark.parametrize("has_one_order", [True, False])
def test_rows_are_gathered_in_the_order_of_the_experts_columns(
    stream: CpuStream, has_one_order: bool
) -> None:
    """Beside a layer without an order, which reads its rows as integers."""
    layers = [Layer.random(stream), Layer.random(stream, seed=10)]
    g = torch.Generator().manual_seed(0)
    of_gate, of_up = (torch.stack([torch.randperm(HIDDEN, generator=g) for _ in HERE]).int() for _ in "gu")
    layers[0].experts.gate.set_order(of_gate)
    layers[0].experts.up.set_order(of_gate if has_one_order else of_up)
    h = handoff(stream, *layers)
    gpu = HandGpu(h)
    cases = []
    for step, n in ((1, 5), (2, MAX_TOKENS)):
        h.begin()
        for i, layer in enumerate(layers):
            x, (ids, weights) = activations("gaussian", n, HIDDEN, seed=i), local_routes(n, seed=i + step)
            gpu.publish(i, step, x, ids, weights)
            gpu.wait(i)
            cases.append((gpu.result(i, n).clone(), layer, x, ids, weights))
    stream.wait()
    h.check()
    for out, *case in cases:
        assert torch.equal(out, alone(stream, *case))
    h.close()


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
def test_experts_have_their_activation_and_biases(activation: Activation, limit: float | None) -> None:
    stream = CpuStream(2)
    plain = Layer.random(stream)
    biases = torch.randn(len(HERE), FF), torch.randn(len(HERE), FF), torch.randn(len(HERE), HIDDEN)
    own = replace(plain.experts, activation=activation, biases=biases, limit=limit, alpha=1.3)
    h = handoff(stream, replace(plain, experts=own))
    gpu, x, (ids, weights) = HandGpu(h), activations("gaussian", 3, HIDDEN), local_routes(3)
    h.begin()
    gpu.publish(0, 1, x, ids, weights)
    gpu.wait(0)
    there = ids >= 0
    expected = run_experts(
        stream, load(x), own.matrices, ids * there, weights * there, activation=activation, limit=limit, alpha=1.3,
        gate_bias=biases[0], up_bias=biases[1], down_bias=biases[2],
    )  # fmt: skip
    assert torch.equal(gpu.result(0, 3), expected)
    h.close()


@pytest.mark.parametrize("experts", [1, 2, 3])
def test_few_experts_have_the_bits_of_many(stream: CpuStream, experts: int) -> None:
    """Those of one or two experts are added as they are computed, those of more in a pass of their own."""
    layer = Layer.random(stream)
    h = handoff(stream, layer)
    gpu = HandGpu(h)
    got = []
    cases = [(n, *local_routes(n, seed=n)) for n in (1, 4, MAX_TOKENS)]
    for step, (n, ids, weights) in enumerate(cases, 1):
        h.begin()
        ids[ids >= experts] = -1
        ids[0, 0] = 0
        gpu.publish(0, step, activations("gaussian", n, HIDDEN, seed=n), ids, weights)
        gpu.wait(0)
        got.append(gpu.result(0, n).clone())
    stream.wait()
    h.check()
    for out, (n, ids, weights) in zip(got, cases, strict=True):
        x = activations("gaussian", n, HIDDEN, seed=n)
        assert torch.equal(out, alone(stream, layer, x, ids, weights))
    h.close()


def test_a_layer_with_nothing_for_the_cpu_is_passed_over(stream: CpuStream) -> None:
    """Also when the GPU, which does not wait then, has gone on to the next step before the pool looks."""
    layer = Layer.random(stream)
    h = handoff(stream, layer, layer)
    gpu = HandGpu(h)
    gpu.result(0, 1).fill_(7.0)
    gpu.raise_flag(0, 2, 0)
    h.begin()
    x, (ids, weights) = activations("gaussian", 3, HIDDEN), local_routes(3)
    gpu.publish(1, 1, x, ids, weights)
    gpu.wait(1)
    stream.wait()
    assert (gpu.result(0, 1) == 7.0).all()
    assert torch.equal(gpu.result(1, 3), alone(stream, layer, x, ids, weights))
    h.check()
    h.close()


def test_a_gpu_that_goes_silent_is_an_error_and_frees_the_pool(stream: CpuStream) -> None:
    layer = Layer.random(stream)
    h = handoff(stream, None, layer, timeout_s=0.2)
    h.begin()
    stream.wait()  # until the watchdog has given the step up
    with pytest.raises(HandoffError, match=r"the GPU has not published layer 1 for 0\.2"):
        h.check()
    with pytest.raises(HandoffError):
        h.begin()
    gpu = HandGpu(h)
    for _ in range(3):  # whatever the GPU still asks is answered, so that its stream ends
        gpu.raise_flag(1, 1, 1)
        gpu.wait(1)
    h.close()


def test_a_pool_that_does_not_answer_is_an_error_and_lets_the_gpu_go(stream: CpuStream) -> None:
    """Here it is busy with something else."""
    layer = Layer.random(stream)
    other, h = handoff(stream, layer), handoff(stream, layer, timeout_s=0.1)
    other.begin()  # it waits for a GPU
    h.begin()
    gpu = HandGpu(h)
    gpu.publish(0, 1, *rows(1)[:1], *local_routes(1))
    gpu.wait(0)
    with pytest.raises(HandoffError, match="the CPU pool has not answered layer 0"):
        h.check()
    HandGpu(other).raise_flag(0, 1, 0)
    stream.wait()
    other.check()
    for each in (other, h):
        each.close()


def test_a_step_that_nobody_announced_is_an_error(stream: CpuStream) -> None:
    h = handoff(stream, Layer.random(stream), timeout_s=0.2)
    gpu = HandGpu(h)
    gpu.publish(0, 1, activations("gaussian", 1, HIDDEN), *local_routes(1))
    gpu.wait(0)
    with pytest.raises(HandoffError, match=r"without begin\(\)"):
        h.check()
    h.close()


@pytest.mark.parametrize(
    ("rows", "expert", "message"),
    [(2, len(HERE), "does not have"), (MAX_TOKENS + 1, 0, "13 rows")],
)
def test_a_request_that_makes_no_sense_is_an_error(
    stream: CpuStream, rows: int, expert: int, message: str
) -> None:
    h = handoff(stream, Layer.random(stream))
    gpu = HandGpu(h)
    gpu.region.slots[0].ids.fill_(expert)
    h.begin()
    gpu.raise_flag(0, 1, rows)
    gpu.wait(0)
    stream.wait()
    with pytest.raises(HandoffError, match=message):
        h.check()
    h.close()


def test_closing_abandons_a_step_under_way(stream: CpuStream) -> None:
    h = handoff(stream, Layer.random(stream))
    h.begin()
    h.close()
    h.close()
    stream.wait()
    with pytest.raises(HandoffError, match="closed"):
        h.begin()


def test_no_cpu_is_used_between_steps() -> None:
    stream = CpuStream(4)
    h = handoff(stream, Layer.random(stream))
    h.begin()
    HandGpu(h).raise_flag(0, 1, 0)
    stream.wait()
    assert comes_to_rest(time.process_time, 0.004, 0.4)  # 1% of one core
    h.close()


def test_a_long_wait_for_the_gpu_is_slept_through() -> None:
    stream = CpuStream(4)
    layer = Layer.random(stream)
    h = handoff(stream, layer)
    h.begin()
    # Of four threads, of which one looks every 0.1 ms (0.03 to 0.07 s); a thread that spins takes 0.4 s.
    assert comes_to_rest(time.process_time, 0.15, 0.4)
    gpu, n = HandGpu(h), 2
    x, (ids, weights) = activations("gaussian", n, HIDDEN), local_routes(n)
    gpu.publish(0, 1, x, ids, weights)
    gpu.wait(0)
    stream.wait()
    assert torch.equal(gpu.result(0, n), alone(stream, layer, x, ids, weights))
    h.close()


def test_shapes_that_do_not_fit_are_refused() -> None:
    stream = CpuStream(1)
    good = Layer.random(stream).experts
    for bad in (
        CpuExperts(good.gate, good.down, good.down, good.expert_map),
        CpuExperts(good.up, good.gate, good.gate, good.expert_map),
    ):
        with pytest.raises(ValueError, match="layer 1: experts of shapes"):
            ExpertHandoff(stream, [good, bad], MAX_TOKENS, HIDDEN, TOP_K, "cpu")
    with pytest.raises(ValueError, match="layer 0"):
        ExpertHandoff(stream, [good], MAX_TOKENS, HIDDEN + 32, TOP_K, "cpu")
    h = ExpertHandoff(stream, [None, good], 4, HIDDEN, TOP_K, "cpu")
    x, ids, weights = rows(5)
    with pytest.raises(ValueError, match="cannot hand off 5 rows"):
        h.publish(1, x, ids, weights)
    with pytest.raises(ValueError, match="layer 0"):
        h.publish(0, x[:1], ids[:1], weights[:1])
    h.close()


def test_the_constants_differ() -> None:
    """Transposed shapes must not pass by chance."""
    assert len({HIDDEN, FF, EXPERTS, len(HERE), TOP_K, MAX_TOKENS}) == 6
