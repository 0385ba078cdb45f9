"""The indexer's Triton kernels against their references: index keys, scores, the choice, and attention to it."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_device import DEVICE, counter, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels import choice_rule
from moeserve.kernels.choice_rule import ChoiceRule, stride_of_choice
from moeserve.kernels.indexer import op
from moeserve.kernels.indexer.blocks import attended_positions, block_keys, block_scores, normed_and_rotated
from moeserve.kernels.indexer.reference import choose_keys, index_scores, index_store
from moeserve.kernels.rope.op import SectionPositions

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
        self.scores = torch.full((self.padded * stride_of_choice(length, rule),), float("nan"), device=DEVICE)

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


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that read 64 scores at once share the choice of rows of more than 256, with 256 candidates."""
    monkeypatch.setattr(op, "CHOSEN_TOGETHER", 64)
    monkeypatch.setattr(choice_rule, "FEW_SCORES", 256)
    monkeypatch.setattr(op, "sample_of_choice", lambda length, rule: 128)


TIES = torch.tensor([0.0, -0.0])
KINDS = {
    "either sign": lambda n, g: (
        torch.randn(n, generator=g) * 10.0 ** torch.randint(-30, 30, (n,), generator=g)
    ),
    "many equal": lambda n, g: torch.randint(-2, 3, (n,), generator=g).float(),
    "all equal": lambda n, g: TIES.repeat(n)[:n],
    "negative": lambda n, g: -torch.rand(n, generator=g),
    "falling": lambda n, g: -torch.arange(n).float(),
    "rare": lambda n, g: (torch.arange(n) % 19 == 3).float(),
}


@pytest.mark.parametrize("length", [55, 262, 325, 1100])
@pytest.mark.parametrize("programs", [4, 64], ids=["one program a row", "several programs"])
def test_choices_shared_by_programs(
    small_parts: None, length: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of few scores and of many, each one shorter than the last, with a table for 1,100: some end with a chunk of
    64. Scores of either sign are in order, equal ones by position; zeros of both signs are equal."""
    monkeypatch.setattr(op, "SHARING_PROGRAMS", programs)
    rule, g, n = ChoiceRule(50), torch.Generator().manual_seed(3), len(KINDS)
    stride = choice_rule.stride_of_choice(1100, rule)
    rows = [kind(length - row, g) for row, kind in enumerate(KINDS.values())]
    scores = torch.full((n, stride), float("nan"))
    for row, values in enumerate(rows):
        scores[row, : len(values)] = values
    table = torch.arange(1100, dtype=torch.int32, device=DEVICE)[None] + 5
    chosen = torch.full((n, 1, 50), GUARD, dtype=torch.int32, device=DEVICE)
    lasts, positions = ints([0] * n), ints([len(values) - 1 for values in rows])
    step = (table, ints([0] * n), positions, counter(n), ints([0]), n, rule)
    op.choose(scores.flatten().to(DEVICE), *step, chosen, lasts)
    for row, (name, values) in enumerate(zip(KINDS, rows, strict=True)):
        expected = choose_keys(values, 50) + 5
        assert chosen[row, 0].tolist() == expected.tolist(), name
    assert lasts.tolist() == [49] * n


@pytest.mark.parametrize("length", [7, 49, 50])
def test_rows_of_at_most_as_many_keys_as_are_chosen(small_parts: None, length: int) -> None:
    """They attend to all, whatever the scores, which nothing wrote."""
    rule = ChoiceRule(50)
    scores = torch.full((choice_rule.stride_of_choice(1100, rule),), float("nan"), device=DEVICE)
    table = torch.arange(1100, dtype=torch.int32, device=DEVICE)[None] + 5
    chosen, lasts = torch.full((1, 1, 50), GUARD, dtype=torch.int32, device=DEVICE), ints([0])
    op.choose(scores, table, ints([0]), ints([length - 1]), counter(1), ints([0]), 1, rule, chosen, lasts)
    assert chosen[0, 0].tolist() == [*range(5, length + 5), *[GUARD] * (50 - length)]
    assert lasts.tolist() == [length - 1]


@pytest.mark.parametrize("candidates", ["too few", "too many"])
def test_a_sample_that_is_far_from_the_row(
    small_parts: None, monkeypatch: pytest.MonkeyPatch, candidates: str
) -> None:
    """High scores are where none is sampled, or only there are high ones. Then one program chooses among all."""
    length, rule, g = 1100, ChoiceRule(50), torch.Generator().manual_seed(4)
    j = torch.arange(128)
    sampled = (((j << 16) | (j * 40503 & 0xFFFF)) * length) // (128 << 16)
    values = torch.rand(length, generator=g)
    values[sampled] += {"too few": 2.0, "too many": -2.0}[candidates]
    if candidates == "too few":
        values[torch.randperm(length, generator=g)[:500]] = 0.0
    table = torch.arange(length, dtype=torch.int32, device=DEVICE)[None]
    scores = torch.zeros(choice_rule.stride_of_choice(length, rule))
    scores[:length] = values
    chosen = torch.zeros(1, 1, 50, dtype=torch.int32, device=DEVICE)
    step = (table, ints([0]), ints([length - 1]), counter(1), ints([0]), 1, rule)
    op.choose(scores.to(DEVICE), *step, chosen, ints([0]))
    assert chosen[0, 0].tolist() == choose_keys(values, 50).tolist()


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


# Position and request of each row: up to 9 blocks of 12 keys and part of another. Seven rows are a prompt's.
BLOCK_ROWS = [(0, 0), (47, 1), (48, 1), *((109 + i, 2) for i in range(7))]


@pytest.mark.parametrize("are_prompts", [False, True])
@pytest.mark.parametrize("local", [1, 2])
def test_each_head_chooses_blocks_as_the_reference_does(local: int, are_prompts: bool) -> None:
    """Blocks of a number of keys that is no power of two; keys are small integers, so that many scores are equal."""
    rule, heads, length, n = ChoiceRule(3, 12, local), 3, 120, len(BLOCK_ROWS)
    g = torch.Generator().manual_seed(local)
    table = torch.randperm(4 * length, generator=g).view(4, length).int()
    keys = torch.randint(-1, 2, (4 * length, 1, DIM), generator=g).half()
    q = torch.randint(-1, 2, (n, heads, DIM), generator=g).half()
    scores = torch.full((n * heads * stride_of_choice(length, rule),), float("nan"), device=DEVICE)
    chosen = torch.full((n, heads, rule.most_blocks), GUARD, dtype=torch.int32, device=DEVICE)
    lasts, numbers = ints([GUARD] * n), ints(range(n))
    positions, requests = (ints(column) for column in zip(*BLOCK_ROWS, strict=True))
    step = (table.to(DEVICE), requests, positions, counter(n), numbers, n, rule)
    op.score_blocks(q.to(DEVICE), keys.to(DEVICE), *step, scores, are_prompts=are_prompts)
    op.choose(scores, *step, chosen, lasts)
    for row, (position, request) in enumerate(BLOCK_ROWS):
        of_request = keys[table[request].long(), 0]
        attended = attended_positions(block_scores(q[row], of_request, position, rule), position, rule)
        for head, expected in enumerate(attended):
            blocks = sorted({at // 12 for at in expected})
            assert chosen[row, head, : len(blocks)].tolist() == blocks, (row, head)
            assert (chosen[row, head, len(blocks) :] == GUARD).all()
            assert lasts[row] == len(expected) - 1


@pytest.mark.parametrize("rule", [ChoiceRule(3, 4), ChoiceRule(3, 16, 1)], ids=["of blocks", "of tokens"])
def test_index_keys_of_blocks(rule: ChoiceRule) -> None:
    """Stored by prompts in pieces that end within blocks; queries of the last piece."""
    heads, rotary, length, eps = 2, 32, 22, 1e-6
    g = torch.Generator().manual_seed(1)
    q, keys = torch.randn(length, heads * DIM, generator=g), torch.randn(length, DIM, generator=g) * 2
    keys = keys.half().float()  # as they are kept until a block is complete
    q_norm, k_norm = torch.rand(DIM, generator=g), torch.rand(DIM, generator=g)
    angles = torch.randn(length, rotary // 2, generator=g)
    cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    table = torch.randperm(2 * length, generator=g).view(2, length).int()
    pool = torch.full((2 * length, 1, DIM), 5.0).half().to(DEVICE)
    for part in (slice(0, 3), slice(3, 10), slice(10, length)):
        n = part.stop - part.start
        queries = torch.full((n + 1, heads, DIM), 99.0).half().to(DEVICE)
        op.block_index_store(
            q[part].to(DEVICE), keys[part].to(DEVICE), q_norm.to(DEVICE), k_norm.to(DEVICE), eps, cos, sin,
            table.to(DEVICE), ints([1] * (n + 1)), ints([*range(part.start, part.stop), 3]),
            ints([*table[1, part].tolist(), 0]), counter(n), rule, queries, pool,
        )  # fmt: skip
        assert (queries[n] == 99.0).all()
    rotated = normed_and_rotated(
        q[10:].view(-1, heads, DIM), q_norm, eps, angles.cos()[10:], angles.sin()[10:]
    )
    torch.testing.assert_close(queries[:-1].cpu().double(), rotated, rtol=2e-3, atol=1e-3)
    expected = block_keys(keys, k_norm, eps, angles.cos(), angles.sin(), rule)
    held = pool[table[1].long(), 0].cpu().double()
    ends = held if rule.local else held[rule.block - 1 :: rule.block]
    torch.testing.assert_close(ends, expected, rtol=2e-3, atol=1e-3)
    assert (pool[table[0].long()] == 5.0).all()


def test_index_keys_behind_a_picture() -> None:
    """Rows rotate by three positions, keys of blocks by those of the block's first token."""
    heads, rotary, length, eps, rule = 2, 32, 22, 1e-6, ChoiceRule(3, 4)
    g = torch.Generator().manual_seed(2)
    q, keys = (
        torch.randn(length, heads * DIM, generator=g),
        torch.randn(length, DIM, generator=g).half().float(),
    )
    norm, angles = torch.rand(DIM, generator=g), torch.randn(length, rotary // 2, generator=g)
    cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    positions = torch.arange(length)[:, None].tile(1, 3)
    positions[5:14] = 5 + torch.stack([torch.zeros(9), torch.arange(9) // 3, torch.arange(9) % 3], 1).long()
    height, width = 5, 5  # frequencies 1, 4, .. 13 and 2, 5, .. 14; time has the other six
    section = torch.tensor([0, 1, 2] * 5 + [0])
    of_rows = torch.stack([angles[positions[:, each], at] for at, each in enumerate(section.tolist())], 1)
    table, pool = (
        torch.arange(length).view(1, length).int(),
        torch.full((length, 1, DIM), 5.0).half().to(DEVICE),
    )
    queries = torch.empty(length, heads, DIM).half().to(DEVICE)
    op.block_index_store(
        q.to(DEVICE), keys.to(DEVICE), norm.to(DEVICE), norm.to(DEVICE), eps, cos, sin, table.to(DEVICE),
        ints([0] * length), ints(list(range(length))), ints(list(range(length))), counter(length), rule, queries, pool,
        SectionPositions(positions.int().to(DEVICE), height, width),
        positions[torch.arange(length) // 4 * 4].int().contiguous().to(DEVICE),
    )  # fmt: skip
    rotated = normed_and_rotated(q.view(length, heads, DIM), norm, eps, of_rows.cos(), of_rows.sin())
    torch.testing.assert_close(queries.cpu().double(), rotated, rtol=2e-3, atol=1e-3)
    expected = block_keys(keys, norm, eps, of_rows.cos(), of_rows.sin(), rule)
    torch.testing.assert_close(pool[3::4, 0].cpu().double(), expected, rtol=2e-3, atol=1e-3)
    flat = block_keys(keys, norm, eps, angles.cos(), angles.sin(), rule)
    assert (flat - expected).abs().max() > 0.1


def test_rows_are_scored_together_in_whole_groups() -> None:
    """A program writes the scores of SHARING_ROWS rows."""
    scores = torch.empty(1000)
    assert [op.rows_together(scores, rows, 20) for rows in (7, 50, 51, 4096)] == [7, 50, 48, 48]
    with pytest.raises(ValueError, match="room for only 15 of 16 rows"):
        op.rows_together(scores, 16, 66)
