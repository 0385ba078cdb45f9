"""The indexer's kernels on a GPU at a context of 32,000: the choice of the reference, and attention to it, in
CUDA graphs that are replayed at other lengths."""

from __future__ import annotations

import pytest
import torch

from moeserve.kernels.attention.reference import Sequence, attention
from moeserve.kernels.choice_rule import ChoiceRule, stride_of_choice
from moeserve.kernels.indexer import op
from moeserve.kernels.indexer.reference import choose_keys, index_scores
from moeserve.kernels.latent.op import attend_chosen, decode_latent, decode_workspace
from tests.kernels.triton_device import counter, ints
from tests.kernels.weights import nmse

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

LENGTH, HEADS, DIM = 32_768, 32, 128
RULE = ChoiceRule(2048)


class Step:
    """Rows of two requests in scattered slots. Index keys, queries and weights are small integers, so that sums are
    exact in any order and many scores are equal."""

    def __init__(self, rows: int) -> None:
        g = torch.Generator("cuda").manual_seed(rows)

        def integers(*shape: int) -> torch.Tensor:
            return torch.randint(-2, 3, shape, generator=g, device="cuda").float()

        self.rows, self.count = rows, counter(rows)
        self.table = torch.randperm(2 * LENGTH, generator=g, device="cuda").view(2, LENGTH).int()
        self.requests = ints([row % 2 if rows < 32 else 1 for row in range(rows)])
        self.positions = ints([LENGTH - rows + row for row in range(rows)])
        self.keys, self.q = integers(2 * LENGTH, 1, DIM).half(), integers(rows, HEADS, DIM).half()
        self.weights = integers(rows, HEADS)
        self.scores = torch.empty(rows * stride_of_choice(LENGTH, RULE), device="cuda")
        self.chosen = torch.zeros(rows, 1, RULE.top, dtype=torch.int32, device="cuda")
        self.lasts, self.numbers = ints([0] * rows), torch.arange(rows, dtype=torch.int32, device="cuda")

    def choose(self) -> None:
        step = (self.table, self.requests, self.positions, self.count, self.numbers, self.rows, RULE)
        op.score_keys(self.q, self.weights, self.keys, *step, self.scores, are_prompts=self.rows >= 32)
        op.choose(self.scores, *step, self.chosen, self.lasts)

    def expected(self, row: int) -> list[int]:
        slots = self.table[int(self.requests[row]), : int(self.positions[row]) + 1].long()
        if len(slots) <= RULE.top:
            return slots.tolist()
        scores = index_scores(self.q[row].cpu(), self.weights[row].cpu(), self.keys[slots, 0].cpu())
        return slots.cpu()[choose_keys(scores, RULE.top)].tolist()

    def assert_chosen(self, rows: list[int]) -> None:
        for row in rows:
            expected = self.expected(row)
            assert self.lasts[row] == len(expected) - 1
            assert self.chosen[row, 0, : len(expected)].tolist() == expected, row


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_the_same_keys_as_the_reference_in_a_graph_at_any_length(rows: int) -> None:
    step = Step(rows)
    step.choose()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.choose()
    some = sorted({0, rows // 2, rows - 1})
    for less in (0, 700, LENGTH - 2048 - rows, LENGTH - rows - 9):
        step.positions.copy_(ints([LENGTH - rows + row - less for row in range(rows)]))
        step.chosen.zero_()
        graph.replay()
        step.assert_chosen(some)


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_attention_to_the_chosen_keys(rows: int) -> None:
    step, heads, rank, rotary = Step(rows), 64, 512, 64
    step.choose()
    g = torch.Generator("cuda").manual_seed(1)
    keys = torch.randn(2 * LENGTH, 1, rank + rotary, generator=g, device="cuda").half()
    q = torch.randn(rows, heads, rank + rotary, generator=g, device="cuda").half() / 12
    parts = q[..., :rank].contiguous(), q[..., rank:].contiguous()
    room = decode_workspace(rows, heads, rank, rotary, "cuda")
    few, many = (torch.empty(rows, heads, rank, device="cuda") for _ in range(2))
    chosen = step.chosen[:, 0]
    decode_latent(*parts, keys, chosen, step.numbers, step.lasts, step.count, room, few, chosen=2048)
    attend_chosen(*parts, keys, chosen, step.numbers, step.lasts, step.count, many)
    for row in (0, rows - 1):
        alone = Sequence(0, 1, int(step.lasts[row]), chosen[row].cpu())
        expected = attention(q[row : row + 1].cpu(), keys.cpu(), keys[..., :rank].cpu(), [alone])
        for out in (few, many):
            assert nmse(out[row : row + 1].cpu(), expected.view(1, heads, rank)) < 1e-5
