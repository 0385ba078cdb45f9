"""The feed-forward of a layer without experts for a few rows on a GPU, as dense products."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.triton_device import DEVICE, counter  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.experts.reference import experts
from moeserve.kernels.gating import Activation, form_of
from moeserve.kernels.planes import dequantize
from moeserve.kernels.quantize.reference import quantize, round_trip
from moeserve.models.blocks.gpu.dense_rows import multiply_dense, takes_dense_products
from moeserve.models.blocks.gpu.workspace import make_workspaces
from moeserve.models.feed_forward import DenseFfnShape
from moeserve.models.loading.gpu_weights import GpuExperts, GpuSharedExpert
from tests.kernels.quantization.plane_tensors import GUARD, planes_of
from tests.kernels.weights import Type, activations, nmse
from tests.support.models.model_header import qwen3moe

HIDDEN, WIDTH, LIVE = 32, 32, 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "form",
    [
        ("silu", None, 0.0),
        ("silu", 0.4, 0.0),
        ("clamped_silu", 0.4, 0.0),
        ("clamped_silu", 0.0, 0.0),
        ("gelu", None, 0.0),
        ("swiglu_oai", 0.5, 1.3),
        ("situ", 0.5, 0.4),
        ("situ", None, 0.4),
    ],
)
def test_dense_products_are_a_mixture_of_one_expert(form: tuple[Activation, float | None, float]) -> None:
    """The dense layer is narrower than the widest one: its products lie at the beginning of their buffer."""
    shape = qwen3moe(hidden_size=HIDDEN, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, num_experts=1, top_k=1,
                     expert_width=32, vocab_size=40)  # fmt: skip
    layers = [
        replace(layer, ffn=DenseFfnShape(width))
        for layer, width in zip(shape.layers, (WIDTH, 64), strict=True)
    ]
    spaces = make_workspaces(
        replace(shape, layers=tuple(layers)), 32, torch.float32, torch.device(DEVICE), float_weights=False
    )
    w = GpuExperts(
        planes_of(Type.Q8_0, WIDTH, HIDDEN), planes_of(Type.Q5_0, WIDTH, HIDDEN), planes_of(Type.Q8_0, HIDDEN, WIDTH)
    )  # fmt: skip
    assert [rows for rows, s in spaces.items() if takes_dense_products(w, s)] == [2, 4, 8]
    floats = planes_of(Type.F32, WIDTH, HIDDEN)
    assert not takes_dense_products(replace(w, up=floats), spaces[4])  # no launch has both kinds

    s, y = spaces[4], activations("gaussian", 4, HIDDEN)
    q = quantize(y)
    for mine, values in ((s.y.x, y), (s.y.codes, q.codes), (s.y.scales, q.scales)):
        assert mine is not None
        mine.copy_(values)
    out = torch.full((4, HIDDEN), GUARD, device=DEVICE)
    multiply_dense(GpuSharedExpert(w, None), s, counter(LIVE), out, form_of(*form))
    matrices = (dequantize(m, 0).cpu()[None] for m in (w.gate, w.up, w.down))
    ids, weights = torch.zeros(LIVE, 1, dtype=torch.int32), torch.ones(LIVE, 1)
    expected = experts(
        y[:LIVE], *matrices, ids, weights, round_trip, round_trip, round_trip, activation=form[0], limit=form[1],
        alpha=form[2],
    )  # fmt: skip
    assert nmse(out[:LIVE].cpu(), expected) < 1e-6
    assert (out[LIVE:] == GUARD).all()
