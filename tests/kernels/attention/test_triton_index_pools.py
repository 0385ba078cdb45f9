"""Pooled index keys in Triton beside their reference: what is stored, and the slots that are chosen by it."""

from __future__ import annotations

import torch

from tests.kernels.triton_device import DEVICE, counter, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.choice_rule import ChoiceRule, stride_of_choice
from moeserve.kernels.indexer import op
from moeserve.kernels.indexer.pools import pooled_keys
from moeserve.kernels.indexer.reference import choose_keys, index_scores

HEADS, DIM, LENGTH, EPS, GUARD = 3, 48, 45, 1e-6, 77.0
RULE = ChoiceRule(3, 4)


class Text:
    """A sequence of request 1, whose tokens come in pieces that end within blocks."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(1)
        self.q, self.keys, self.gates, self.weights = (
            torch.randn(LENGTH, width, generator=g) for width in (HEADS * DIM, DIM, DIM, HEADS)
        )
        self.gates = (self.gates * 4).half().float()  # as they are kept until a block is complete
        self.norm, self.bias = 1 + 0.3 * torch.randn(DIM, generator=g), torch.randn(DIM, generator=g)
        self.ape = torch.randn(RULE.block, DIM, generator=g) * 2
        self.table = torch.randperm(2 * LENGTH, generator=g).view(2, LENGTH).int()
        self.pool = torch.full((2 * LENGTH, 1, 2 * DIM), GUARD).half().to(DEVICE)
        self.chosen: dict[int, list[int]] = {}

    def step(self, part: slice) -> None:
        """Stores the part's index keys, and chooses. Behind its rows is one that is not there."""
        n = part.stop - part.start
        queries = torch.full((n + 1, HEADS, DIM), GUARD).half().to(DEVICE)
        positions = ints([*range(part.start, part.stop), 3])
        of_rows = (self.table.to(DEVICE), ints([1] * (n + 1)), positions)
        slots = ints([*self.table[1, part].tolist(), int(self.table[0, 0])])
        parts = (self.q, self.keys, self.gates, self.norm, self.bias, self.ape)
        q, keys, gates, norm, bias, ape = (x.to(DEVICE) for x in parts)
        op.pool_store(
            q[part],
            keys[part],
            gates[part],
            norm,
            bias,
            EPS,
            ape,
            *of_rows,
            slots,
            counter(n),
            queries,
            self.pool,
        )
        assert (queries[n] == GUARD).all()
        torch.testing.assert_close(queries[:n].cpu().flatten(1), self.q[part].half())
        scores = torch.full(((n + 1) * stride_of_choice(LENGTH, RULE),), float("nan"), device=DEVICE)
        chosen = torch.full((n + 1, 1, RULE.most_blocks * RULE.block), -7, dtype=torch.int32, device=DEVICE)
        lasts, numbers = ints([-7] * (n + 1)), ints(range(n + 1))
        step = (*of_rows, counter(n), numbers, n + 1, RULE)
        op.score_keys(
            queries, self.weights[part].to(DEVICE), self.pool, *step, scores, are_prompts=part.start == 0
        )
        op.choose(scores, *step, chosen, lasts)
        assert (chosen[n] == -7).all()
        for row, last in enumerate(lasts[:n].tolist()):
            self.chosen[part.start + row] = chosen[row, 0, : last + 1].tolist()
            assert (chosen[row, 0, last + 1 :] == -7).all()


def test_index_keys_of_blocks_and_the_slots_of_their_keys() -> None:
    text = Text()
    for part in (slice(0, 3), slice(3, 10), slice(10, 11), slice(11, LENGTH)):
        text.step(part)
    expected = pooled_keys(text.keys, text.gates, text.norm, text.bias, EPS, text.ape)
    held = text.pool[text.table[1].long(), 0].cpu()
    pooled = held[RULE.block - 1 :: RULE.block, :DIM]
    torch.testing.assert_close(pooled.double(), expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(held[:, DIM:].float(), text.gates)
    assert (text.pool[text.table[0].long()] == GUARD).all()
    for position in range(LENGTH):
        blocks = RULE.scored_blocks(position)
        q = text.q[position].half().view(HEADS, DIM)
        taken = choose_keys(index_scores(q, text.weights[position], pooled[:blocks]), RULE.top).tolist()
        attended = [block * RULE.block + i for block in taken for i in range(RULE.block)]
        attended += range(blocks * RULE.block, position + 1)
        assert text.chosen[position] == text.table[1][torch.tensor(attended)].tolist(), position
