"""RMSNorm against float64, chosen rows, any batch and thread count."""

from __future__ import annotations

import pytest
import torch

from moeserve.kernels.norm.reference import norm
from tests.kernels.operations import ISAS, run_norm, stream_of
from tests.kernels.weights import ACTIVATIONS, activations, nmse

each_isa = pytest.mark.parametrize("isa", ISAS)


@each_isa
@pytest.mark.parametrize("distribution", ACTIVATIONS)
@pytest.mark.parametrize("cols", [32, 96, 2048])
def test_against_float64(isa: str, distribution: str, cols: int) -> None:
    x, weight = activations(distribution, 65, cols), activations("gaussian", 1, cols, seed=1)[0]
    for scale in (1e-6, 1.0, 1e6):
        y = run_norm(stream_of(isa), x * scale, weight, 1e-6)
        expected = norm(x * scale, weight, 1e-6)
        torch.testing.assert_close(y.f32.double(), expected, rtol=5e-7, atol=0)
        assert nmse(y.f32, expected) < 1e-13


@each_isa
@pytest.mark.parametrize("cols", [32, 96, 2048])
def test_layer_norm_against_float64_and_torch(isa: str, cols: int) -> None:
    """The mean of these rows is far from 0."""
    x, weight = activations("gaussian", 65, cols) + 3, activations("gaussian", 1, cols, seed=1)[0]
    expected = norm(x, weight, 1e-5, centered=True)
    torch.testing.assert_close(
        expected, torch.nn.functional.layer_norm(x.double(), (cols,), weight.double(), eps=1e-5)
    )
    whole = run_norm(stream_of(isa, 1), x, weight, 1e-5, centered=True)
    assert nmse(whole.f32, expected) < 1e-12
    for n in (1, 7, 64):
        part = run_norm(stream_of(isa, 3), x[:n], weight, 1e-5, centered=True)
        assert torch.equal(part.f32, whole.f32[:n])
        assert torch.equal(part.q8, whole.q8[:n])


@each_isa
def test_a_row_of_zeros_gives_zeros(isa: str) -> None:
    assert not run_norm(stream_of(isa), torch.zeros(2, 64), torch.ones(64), 1e-6).f32.any()


@each_isa
def test_chosen_rows(isa: str) -> None:
    x, weight = activations("gaussian", 9, 64), torch.rand(64)
    rows = torch.tensor([8, 0, 3, 3], dtype=torch.int32)
    chosen = run_norm(stream_of(isa), x, weight, 1e-6, rows)
    whole = run_norm(stream_of(isa), x, weight, 1e-6)
    assert torch.equal(chosen.f32, whole.f32[rows.long()])
    assert torch.equal(chosen.q8, whole.q8[rows.long()])


@each_isa
def test_batch_and_threads_do_not_change_a_bit(isa: str) -> None:
    x, weight = activations("heavy-tailed", 65, 768), torch.rand(768)
    whole = run_norm(stream_of(isa, 1), x, weight, 1e-6)
    for threads in (2, 3):
        for n in (*range(1, 10), 64, 65):
            part = run_norm(stream_of(isa, threads), x[:n], weight, 1e-6)
            assert torch.equal(part.f32, whole.f32[:n])
            assert torch.equal(part.q8, whole.q8[:n])


@each_isa
def test_a_broken_row_stays_broken_and_alone(isa: str) -> None:
    """NaN must reach the logits, where it fails its own request; int8 could have hidden it."""
    x = activations("gaussian", 3, 64)
    x[1, 40] = float("nan")
    y = run_norm(stream_of(isa), x, torch.ones(64), 1e-6)
    assert y.f32[1].isnan().all()
    scales = y.q8[1, 64:].view(torch.float32)[[0, 4]]
    assert scales.isnan().all()
    assert y.f32[[0, 2]].isfinite().all()
