"""The router's choice: ids exactly, of equals the lower; weights to float32's precision."""

from __future__ import annotations

import pytest
import torch

from moeserve.kernels.routing.reference import route
from tests.kernels.operations import ISAS, run_route, stream_of


def check(logits: torch.Tensor, top_k: int, isa: str = "plain", threads: int = 2) -> None:
    room = run_route(stream_of(isa, threads), logits, top_k)
    ids, weights = route(logits, top_k)
    assert torch.equal(room.ids, ids)
    torch.testing.assert_close(room.weights.double(), weights, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (8, 2), (128, 8), (130, 1), (60, 60)])
def test_against_the_reference(experts: int, top_k: int, isa: str) -> None:
    generator = torch.Generator().manual_seed(experts)
    for scale in (1e-3, 1.0, 30.0):
        logits = torch.randn(65, experts, generator=generator) * scale
        for n in (1, 2, 9, 65):
            check(logits[:n].clone(), top_k, isa, threads=3)


def test_of_equal_logits_the_lower_ids_are_chosen() -> None:
    check(torch.zeros(3, 16), 4)
    check((torch.arange(64).view(2, 32) % 3).float(), 8)
    check(torch.tensor([[-0.0, 0.0, -0.0, -1.0]]), 2)


def test_huge_differences_and_impossible_experts() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0, 1e4 - 1], [3e38, -3e38, 0.0, 1.0]])
    check(logits, 3)
    masked = torch.tensor([[0.0, -float("inf"), 1.0, -float("inf")]])
    check(masked, 3)


def test_it_is_a_softmax_over_all_renormalised_over_the_chosen() -> None:
    """The reference against the model's definition (Hugging Face's Qwen3MoeTopKRouter, norm_topk_prob)."""
    logits = torch.randn(20, 128, generator=torch.Generator().manual_seed(1)).double()
    values, ids = logits.softmax(dim=1).topk(8)
    chosen, weights = route(logits, 8)
    assert torch.equal(chosen.long(), ids)
    torch.testing.assert_close(weights, values / values.sum(dim=1, keepdim=True))


def test_broken_logits_still_give_ids_that_exist() -> None:
    """The ids index memory. NaN weights then carry on to the logits."""
    nan = float("nan")
    logits = torch.tensor(
        [[nan] * 6, [0.0, nan, 1.0, nan, 2.0, nan], [float("inf")] * 6, [-float("inf")] * 6]
    )
    room = run_route(stream_of("plain"), logits, 4)
    for ids in room.ids.tolist():
        assert len(set(ids)) == 4
        assert set(ids) <= set(range(6))
    assert room.weights[0].isnan().any()
