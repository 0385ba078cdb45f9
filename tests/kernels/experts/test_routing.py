"""The router's choice: ids exactly, of equals the lower; weights to float32's precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moeserve.kernels.routing.options import RouterOptions, Scoring
from moeserve.kernels.routing.reference import route
from moeserve.kernels.stream_operands import RoutingWorkspace
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


VARIANTS = [
    (RouterOptions(normalize=False), 128, 8),
    (RouterOptions(scale=2.5), 64, 6),
    (RouterOptions("softmax_topk"), 32, 4),
    (RouterOptions("softmax_topk", normalize=False, scale=1.5), 32, 4),
    (RouterOptions("sigmoid"), 256, 8),
    (RouterOptions("sigmoid", normalize=False), 60, 3),
    (RouterOptions("sigmoid", scale=2.5, groups=8, top_groups=4), 256, 8),
    (RouterOptions("sqrt_softplus", scale=1.5), 256, 6),
    (RouterOptions("sqrt_softplus", normalize=False), 60, 3),
    (RouterOptions("softmax", normalize=False, scale=16.0, groups=8, top_groups=3), 160, 6),
    (RouterOptions("softmax", normalize=False, scale=16.0, groups=8, top_groups=3, group_best=1), 160, 6),
    (RouterOptions("softmax_topk", groups=2, top_groups=1), 10, 5),
    (RouterOptions("sigmoid", groups=16, top_groups=5), 16, 5),  # groups of one expert
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("router", "experts", "top_k"), VARIANTS, ids=str)
def test_every_router_against_the_reference(
    router: RouterOptions, experts: int, top_k: int, biased: bool, isa: str
) -> None:
    generator = torch.Generator().manual_seed(experts)
    bias = torch.randn(experts, generator=generator) * 0.1 if biased else None
    logits = torch.randn(65, experts, generator=generator) * 2
    ids, weights = route(logits, top_k, router, bias)
    for n, threads in ((65, 3), (9, 2), (1, 1)):
        found = run_route(stream_of(isa, threads), logits[:n].clone(), top_k, router, bias)
        assert torch.equal(found.ids, ids[:n])
        torch.testing.assert_close(found.weights.double(), weights[:n], rtol=2e-6, atol=1e-9)
        if n == 65:
            whole = found.weights
        assert torch.equal(found.weights, whole[:n])


def test_the_bias_chooses_and_leaves_the_weights_alone() -> None:
    logits, bias = torch.tensor([[3.0, 2.0, 1.0, 0.0]]), torch.tensor([-1.0, 0.0, 0.0, 1.0])
    found = run_route(stream_of("plain"), logits, 2, RouterOptions("sigmoid", normalize=False), bias)
    assert found.ids.tolist() == [[3, 1]]
    torch.testing.assert_close(found.weights, torch.sigmoid(torch.tensor([[0.0, 2.0]])))


def test_only_experts_of_the_top_groups_are_chosen() -> None:
    """The best expert is in a group whose two best are worse together."""
    logits = torch.tensor([[4.0, -9.0, -9.0, 2.0, 2.0, -9.0]])
    found = run_route(stream_of("plain"), logits, 2, RouterOptions("sigmoid", groups=2, top_groups=1))
    assert found.ids.tolist() == [[3, 4]]


def test_groups_by_their_best_expert_alone() -> None:
    logits = torch.tensor([[4.0, -9.0, -9.0, 2.0, 2.0, -9.0]])
    router = RouterOptions("sigmoid", groups=2, top_groups=1, group_best=1)
    assert run_route(stream_of("plain"), logits, 2, router).ids.tolist() == [[0, 1]]


def test_a_token_that_no_expert_wants_gets_no_nan() -> None:
    found = run_route(stream_of("plain"), torch.full((1, 4), -200.0), 2, RouterOptions("sigmoid"))
    assert found.weights.tolist() == [[0.0, 0.0]]


def test_a_biased_choice_far_below_the_largest_logit_has_weights() -> None:
    """Relative to the largest of all logits, the exponentials of the chosen would both be 0."""
    logits, bias = torch.tensor([[200.0, 1.0, 0.0]]), torch.tensor([-9.0, 0.0, 0.0])
    found = run_route(stream_of("plain"), logits, 2, bias=bias)
    assert found.ids.tolist() == [[1, 2]]
    torch.testing.assert_close(found.weights, torch.tensor([[1.0, 0.0]]).softmax(dim=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scoring": "relu"}, "scoring 'relu'"),
        ({"groups": 2, "top_groups": 3}, "top_groups 3"),
        ({"groups": 0, "top_groups": 0}, "top_groups 0"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RouterOptions(**options)


def test_routers_that_cannot_choose() -> None:
    RouterOptions(groups=4, top_groups=2).check(16, 8)
    with pytest.raises(ValueError, match="do not divide"):
        RouterOptions(groups=3, top_groups=2).check(16, 8)
    with pytest.raises(ValueError, match="top_k 9"):
        RouterOptions(groups=4, top_groups=2).check(16, 9)
    for top_k, router in ((8, RouterOptions(groups=3)), (9, RouterOptions(groups=4, top_groups=2))):
        with pytest.raises(ValueError, match=r"router|workspace\.ids"):
            run_route(stream_of("plain"), torch.zeros(1, 16), top_k, router)


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


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scoring", ["sqrt_softplus", "softmax"])
def test_experts_by_token_id_are_only_weighed(scoring: Scoring, isa: str) -> None:
    router, logits = RouterOptions(scoring, scale=1.5), 9 * torch.randn(65, 40)
    table = torch.stack([torch.randperm(40)[:6] for _ in range(100)]).int()
    tokens = torch.randint(0, 100, (65,)).int()
    room = RoutingWorkspace(65, 40, 6)
    stream_of(isa).route(logits, 65, room, router, by_token=(table, tokens))
    stream_of(isa).wait()
    ids, weights = route(logits, 6, router, given=table[tokens.long()])
    assert torch.equal(room.ids, ids)
    torch.testing.assert_close(room.weights.double(), weights, rtol=2e-6, atol=1e-9)


def test_a_table_with_an_expert_that_is_not_there_is_refused() -> None:
    room, table = RoutingWorkspace(1, 4, 2), torch.tensor([[0, 1], [2, 4]], dtype=torch.int32)
    for token, cause in ((1, "expert 4 is not in"), (2, "token id 2 is not in")):
        with pytest.raises(IndexError, match=cause):
            stream_of("plain").route(
                torch.zeros(1, 4), 1, room, by_token=(table, torch.tensor([token]).int())
            )
