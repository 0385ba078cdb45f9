"""The indexer's Triton kernels against their references: index keys, scores, the choice, and attention to it."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_device import DEVICE, counter, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.choice_rule import ChoiceRule
from moeserve.kernels.indexer import op
from moeserve.kernels.indexer.reference import choose_keys, index_scores, index_store

GUARD = -7
TOP, DIM = 24, 64
# Position and request of each row: fewer keys than are chosen, as many, more; a prompt's rows, which share keys.
ROWS = [(0, 0), (TOP - 1, 1), (TOP, 1), (300, 2), *((280 + i, 2) for i in range(18)), (5, 0), (77, 3)]


class Step:
    """Rows of a step beside padding ones. Index keys, queries and weights are small integers, so that sums are exact
    and many scores are equal."""

    def __init__(self, heads: int, rule: ChoiceRule, levels: int = 2) -> None:
        g = torch.Generator().manual_seed(heads)
        length = 320

        def integers(*shape: int) -> torch.Tensor:
            return torch.randint(-levels, levels + 1, shape, generator=g).float()

        self.rule, self.count, self.padded = rule, len(ROWS), len(ROWS) + 3
        self.positions = ints([*(p for p, _ in ROWS), 999, 999, 999])
        self.requests = ints([*(r for _, r in ROWS), 0, 0, 0])
        self.table = torch.randperm(4 * length, generator=g).view(4, length).int().to(DEVICE)
        self.keys = integers(4 * length, 1, DIM).half().to(DEVICE)
        self.q = integers(self.padded, heads, DIM).half().to(DEVICE)
        self.weights = integers(self.padded, heads + 5)[:, 3 : 3 + heads].to(DEVICE)
        self.scores = torch.full((self.padded * length,), float("nan"), device=DEVICE)

    def chosen(self, together: int, *, are_prompts: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and chooses for `together` rows at a time."""
        width = self.rule.top + (self.rule.block > 1)
        chosen = torch.full((self.padded, 1, width), GUARD, dtype=torch.int32, device=DEVICE)
        lasts = torch.full((self.padded,), GUARD, dtype=torch.int32, device=DEVICE)
        numbers, count = torch.arange(self.padded, dtype=torch.int32, device=DEVICE), counter(self.count)
        for first in range(0, self.padded, together):
            rows = min(together, self.padded - first)
            step = (self.table, self.requests, self.positions, count, numbers[first:], rows, self.rule)
            op.score_keys(self.q, self.weights, self.keys, *step, self.scores, are_prompts=are_prompts)
            op.choose(self.scores, *step, chosen, lasts)
        return chosen.cpu(), lasts.cpu()

    def expected(self, row: int) -> list[int]:
        """The blocks that a row attends to, in order."""
        position, block = ROWS[row][0], self.rule.block
        scored, blocks = (position + 1) // block, position // block + 1
        slots = self.table[ROWS[row][1]].cpu().long()
        if scored <= self.rule.top:
            return list(range(blocks))
        ends = slots[block - 1 : scored * block : block]
        scores = index_scores(self.q[row].cpu(), self.weights[row].cpu(), self.keys[:, 0].cpu()[ends])
        return [*choose_keys(scores, self.rule.top).tolist(), *range(scored, blocks)]


@pytest.mark.parametrize("are_prompts", [False, True])
@pytest.mark.parametrize("heads", [3, 80])  # 64 are multiplied together
def test_the_same_keys_as_the_reference(heads: int, are_prompts: bool) -> None:
    step = Step(heads, ChoiceRule(TOP))
    chosen, lasts = step.chosen(16 if heads == 3 else step.padded, are_prompts=are_prompts)
    for row, (position, request) in enumerate(ROWS):
        expected = step.table[request].cpu()[step.expected(row)].tolist()
        assert chosen[row, 0, : len(expected)].tolist() == expected, row
        assert (chosen[row, 0, len(expected) :] == GUARD).all()
        assert lasts[row] == min(position, TOP - 1)
    assert (chosen[step.count :] == GUARD).all()
    assert (lasts[step.count :] == GUARD).all()


def test_blocks_with_one_index_key_each() -> None:
    step = Step(4, ChoiceRule(9, 4))
    step.weights.fill_(1.0)
    chosen, lasts = step.chosen(16, are_prompts=True)
    for row, (position, _) in enumerate(ROWS):
        expected = step.expected(row)
        assert chosen[row, 0, : len(expected)].tolist() == expected, row
        keys = [4 * block + i for block in expected for i in range(4)]
        assert keys[lasts[row]] == (position if (position + 1) % 4 or position < 36 else keys[-1])


def test_scores_of_either_sign_are_in_order_and_equal_ones_by_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over several chunks of scores; zeros of both signs are equal."""
    monkeypatch.setattr(op, "CHOSEN_TOGETHER", 64)
    monkeypatch.setattr(op, "next_power_of_2", lambda n: 64)
    length, rule = 1000, ChoiceRule(100)
    g = torch.Generator().manual_seed(3)
    kinds = [
        torch.randn(length, generator=g) * 10.0 ** torch.randint(-30, 30, (length,), generator=g),
        torch.randint(-2, 3, (length,), generator=g).float(),
        torch.tensor([0.0, -0.0]).repeat(length // 2),
        -torch.rand(length, generator=g),
    ]
    table = torch.arange(length, dtype=torch.int32, device=DEVICE)[None]
    scores = torch.stack(kinds).flatten().to(DEVICE)
    chosen = torch.zeros(4, 1, 100, dtype=torch.int32, device=DEVICE)
    lasts = ints([0] * 4)
    op.choose(
        scores, table, ints([0] * 4), ints([length - 1] * 4), counter(4), ints([0]), 4, rule, chosen, lasts
    )
    for row, values in enumerate(kinds):
        assert chosen[row, 0].tolist() == choose_keys(values, 100).tolist(), row


@pytest.mark.parametrize("in_pairs", [False, True])
def test_index_keys_and_queries(in_pairs: bool) -> None:
    n, heads, rotary, existing, eps = 4, 3, 32, 3, 1e-6
    g = torch.Generator().manual_seed(1)
    fused = torch.randn(n, heads * DIM + DIM + 2, generator=g) * 2
    q, keys, _ = fused.to(DEVICE).split([heads * DIM, DIM, 2], dim=1)
    norm, bias = torch.rand(DIM, generator=g), torch.randn(DIM, generator=g)
    angles = torch.randn(50, rotary // 2, generator=g)
    positions, slots = torch.tensor([40, 0, 7, 1]), torch.tensor([7, -1, 2, 3])
    pool = torch.full((9, 1, DIM), 5.0).half().to(DEVICE)
    queries = torch.full((n, heads, DIM), 99.0).half().to(DEVICE)
    op.index_store(
        q, keys, norm.to(DEVICE), bias.to(DEVICE), eps, angles.cos().to(DEVICE), angles.sin().to(DEVICE),
        ints(positions), ints(slots), counter(existing), queries, pool, in_pairs=in_pairs,
    )  # fmt: skip
    expected = torch.full((9, 1, DIM), 5.0, dtype=torch.float64)
    at = angles.cos()[positions], angles.sin()[positions]
    rotated = index_store(
        fused[:, : heads * DIM].view(n, heads, DIM), fused[:, heads * DIM : -2], norm, bias, eps, *at, slots % 9,
        expected, in_pairs=in_pairs,
    )  # fmt: skip
    torch.testing.assert_close(queries[:existing].cpu().double(), rotated[:existing], rtol=1e-3, atol=1e-4)
    assert (queries[existing:] == 99.0).all()
    for slot in (7, 2):
        torch.testing.assert_close(pool[slot].cpu().double(), expected[slot], rtol=1e-3, atol=1e-4)
    assert (pool[[0, 1, 3, 4, 5, 6, 8]] == 5.0).all()
