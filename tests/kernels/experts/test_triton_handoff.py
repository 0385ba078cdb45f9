"""The hand-off end to end: rows published by the kernels, computed by the pool, collected by the kernels."""

from __future__ import annotations

import pytest

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
import torch
from gguf.constants import GGMLQuantizationType as Type
from torch import Tensor

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.handoff import ExpertHandoff
from moeserve.kernels.quantize.reference import quantize
from tests.kernels.experts.handoff_world import EXPERTS, HERE, HIDDEN, MAX_TOKENS, Q8, TOP_K, Layer, rows
from tests.kernels.weights import nmse

GUARD = 12345.0
MIXED = (Type.BF16, Type.Q8_0, Type.F16)  # gate and up want other activations
FLOATS = (Type.F32, Type.BF16, Type.F32)


@pytest.fixture(scope="module")
def stream() -> CpuStream:
    return CpuStream(2)


def handoff(stream: CpuStream, *layers: Layer | None) -> ExpertHandoff:
    experts = [None if layer is None else layer.experts for layer in layers]
    return ExpertHandoff(stream, experts, MAX_TOKENS, HIDDEN, TOP_K, DEVICE)


def run_layer(h: ExpertHandoff, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.full((len(x) + 1, HIDDEN), GUARD, device=DEVICE)
    h.publish(layer, x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
    h.collect(layer, out[:-1])
    assert (out[-1] == GUARD).all()
    return out[:-1].cpu()


def finish(h: ExpertHandoff) -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    h.check()
    assert int(h._ticket) == 0
    h.close()


@pytest.mark.parametrize("kinds", [Q8, MIXED, FLOATS], ids=["integers", "mixed", "floats"])
def test_against_the_reference(stream: CpuStream, kinds: tuple[Type, Type, Type]) -> None:
    """Batches of several sizes, one after another; a padding row; a layer without CPU experts between."""
    layers = [Layer.random(stream, kinds), None, Layer.random(stream, kinds, seed=10)]
    h = handoff(stream, *layers)
    for n in (1, 5, MAX_TOKENS, 2):
        h.begin()
        for i, layer in enumerate(layers):
            if layer is None:
                continue
            x, ids, weights = rows(n, seed=i + n)
            if n > 2:
                ids[-1], weights[-1] = -1, 0.0
            out, expected = run_layer(h, i, x, ids, weights), layer.expected(x, ids, weights)
            assert nmse(out, expected) <= 3e-4
            assert torch.equal(out == 0.0, expected == 0.0)  # rows without experts here
    finish(h)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_published_rows_are_quantised_as_the_cpu_would(stream: CpuStream, dtype: torch.dtype) -> None:
    h = handoff(stream, Layer.random(stream))
    x, ids, weights = rows(4)
    ids[:] = torch.tensor(HERE[:TOP_K])
    x[0, :32] = 0.0
    x[1] *= 1e-6  # float16: subnormal
    x[2, 40] = float("inf")
    x[2, 70] = float("nan")
    x = x.to(dtype)
    h.begin()
    h.publish(0, x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
    h.collect(0, torch.empty(4, HIDDEN, device=DEVICE))
    finish(h)
    slot, expected = h._region.slots[0], quantize(x.float()).rows()
    assert slot.q8 is not None
    finite = [0, 1, 3]
    assert torch.equal(slot.q8[:4][finite], expected[finite])
    scales = slot.q8[2, HIDDEN:].view(torch.float32).view(-1, 4)[:, 0]
    assert torch.equal(scales.isnan(), torch.tensor([False, True, True]))
    assert torch.equal(slot.q8[2, :32], expected[2, :32])


def test_nothing_on_the_cpu_needs_no_pool(stream: CpuStream) -> None:
    """The GPU goes through without an answer: here nobody has announced the step yet."""
    layer = Layer.random(stream)
    h = handoff(stream, layer, layer)
    x, ids, weights = rows(3)
    ids[:] = torch.tensor([e for e in range(EXPERTS) if e not in HERE])
    for i in range(2):
        assert (run_layer(h, i, x, ids, weights) == 0.0).all()
    h.begin()
    stream.wait()
    assert not h.expert_token_counts(0).any()
    finish(h)
