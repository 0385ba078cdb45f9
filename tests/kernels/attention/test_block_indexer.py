"""Indexers of blocks on the CPU against their reference: index keys, the choice, and attention to it."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from moeserve.kernels.attention.cpu_plan import build_attention_plan
from moeserve.kernels.attention.reference import Sequence, attention
from moeserve.kernels.choice_rule import ChoiceRule
from moeserve.kernels.cpu_stream import AttentionPlan
from moeserve.kernels.indexer.blocks import (
    attended_positions,
    block_keys,
    block_scores,
    normed_and_rotated,
)
from moeserve.kernels.stream_operands import Activations, Heads, KvLayer
from tests.kernels.operations import ISAS, stream_of
from tests.kernels.weights import nmse

each_isa = pytest.mark.parametrize("isa", ISAS)
DIM, ROTARY, EPS = 64, 32, 1e-6
HEADS = Heads(8, 2, 64)
POOLED = ChoiceRule(5, 4)
BY_MAXIMUM = ChoiceRule(2, 16, 1)
RULES = {
    "pooled": POOLED,
    "pairs": ChoiceRule(9, 2),
    "by maximum": BY_MAXIMUM,
    "longer than kernels' blocks": ChoiceRule(1, 40, 2),
}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
# Position and count of each sequence: below, at and beyond the first position that chooses; beyond a unit of scores.
SPANS = [(0, 30), (22, 3), (47, 2), (48, 1), (120, 41), (4500, 3), (7, 5)]


class Step:
    """The sequences of a step. Slots of no sequence hold NaN."""

    def __init__(
        self, rule: ChoiceRule, spans: list[tuple[int, int]] = SPANS, *, integers: bool = True
    ) -> None:
        """integers: index queries and keys are small ones, so that sums are exact and many scores are equal."""
        generator = torch.Generator().manual_seed(len(spans))
        self.rule, self.heads = rule, HEADS.num_kv if rule.by_head else 3
        used, rows = sum(p + n for p, n in spans), sum(n for _, n in spans)
        pool = torch.randperm(2 * used, generator=generator).int()
        self.sequences, row, slot = [], 0, 0
        for position, count in spans:
            self.sequences.append(Sequence(row, count, position, pool[slot : slot + position + count]))
            row, slot = row + count, slot + position + count

        def numbers(*shape: int) -> torch.Tensor:
            if integers:
                return torch.randint(-2, 3, shape, generator=generator).float()
            return torch.randn(shape, generator=generator)

        self.q = numbers(rows, self.heads * DIM)
        index_keys = numbers(2 * used, 1, DIM).half()
        keys, values = (
            torch.randn(2 * used, HEADS.num_kv, HEADS.dim, generator=generator).half() for _ in "kv"
        )
        for tensor in (index_keys, keys, values):
            tensor[pool[used:].long()] = float("nan")
        self.kv = KvLayer(keys, values, index_keys=index_keys)
        self.attended_q = torch.randn(rows, HEADS.num, HEADS.dim, generator=generator) / HEADS.dim**0.5
        self.gate = torch.randn(rows, HEADS.num * HEADS.dim, generator=generator)

    def plan(self, sequences: list[Sequence], threads: int = 2) -> AttentionPlan:
        columns = (
            np.array(column, np.int32)
            for column in zip(*((s.row, s.count, s.position) for s in sequences), strict=True)
        )
        self.table = np.zeros((len(sequences), max(len(s.slots) for s in sequences)), np.int32)
        for at, s in enumerate(sequences):
            self.table[at, : len(s.slots)] = s.slots.numpy()
        plan, each = AttentionPlan(), np.arange(len(sequences), dtype=np.int32)
        build_attention_plan(plan, *columns, each, self.table, HEADS, threads, rule=self.rule)
        return plan

    def chosen(self, isa: str, threads: int = 2) -> dict[tuple[int, int], list[int]]:
        """The KV slots that each row, and each KV head that chooses, attends to, if it has a choice."""
        stream, plan = stream_of(isa, threads), self.plan(self.sequences)
        stream.choose_keys(plan, self.q, None, self.kv, self.heads)
        stream.wait()
        choices = HEADS.num_kv if self.rule.by_head else 1
        found = {}
        for number, slots in plan.chosen:
            assert all(slot % choices == number % choices for slot in slots)
            found[divmod(number, choices)] = [slot // choices for slot in slots]
        return found

    def expected(self) -> dict[tuple[int, int], list[int]]:
        assert self.kv.index_keys is not None
        rule, found = self.rule, {}
        for s in self.sequences:
            keys = self.kv.index_keys[s.slots.long(), 0]
            index_keys = keys if rule.local else keys[rule.block - 1 :: rule.block]
            for row in range(s.row, s.row + s.count):
                position = s.position + row - s.row
                if rule.scored_blocks(position) <= rule.top:
                    continue
                scores = block_scores(self.q[row].view(self.heads, DIM), index_keys, position, rule)
                for head, positions in enumerate(attended_positions(scores, position, rule)):
                    found[row, head] = s.slots[torch.tensor(positions)].tolist()
        return found

    def attended(
        self, isa: str, sequences: list[Sequence], first: int, count: int, threads: int = 2
    ) -> Activations:
        """Attention of rows first .. first + count - 1, to which `sequences` are relative."""
        stream, plan = stream_of(isa, threads), self.plan(sequences, threads)
        rows, out = slice(first, first + count), Activations(count, HEADS.num * HEADS.dim)
        stream.choose_keys(plan, self.q[rows].contiguous(), None, self.kv, self.heads)
        gate = self.gate[rows].contiguous()
        stream.attention(plan, self.attended_q[rows].contiguous(), self.kv, out, HEADS, gate=gate)
        stream.wait()
        return out


@cache
def step_of(rule: ChoiceRule) -> Step:
    return Step(rule)


@each_isa
@each_rule
def test_the_same_keys_as_the_reference(rule: ChoiceRule, isa: str) -> None:
    step = step_of(rule)
    expected = step.expected()
    assert len(expected) > 40
    for threads in (1, 3):
        assert step.chosen(isa, threads) == expected


@each_isa
@pytest.mark.parametrize("rule", [POOLED, BY_MAXIMUM])
def test_scores_of_either_sign_are_in_order(rule: ChoiceRule, isa: str) -> None:
    """Products of random numbers, whose sums are not exact; the keys are chosen by which differ enough."""
    step = Step(rule, [(600, 9)], integers=False)
    assert step.chosen(isa) == step.expected()


def test_rows_whose_scores_do_not_fit_together_are_scored_in_turns() -> None:
    """300 rows with 7,500 blocks each: not all are held at once (kMostScores in key_choice.h)."""
    step = Step(ChoiceRule(5, 2), [(15_000, 600)])
    found, expected = step.chosen(ISAS[-1]), step.expected()
    assert found == expected


@each_isa
@each_rule
def test_attention_to_the_chosen_keys_against_float64(rule: ChoiceRule, isa: str) -> None:
    step = step_of(rule)
    n, group = len(step.q), HEADS.num // HEADS.num_kv
    out = step.attended(isa, step.sequences, 0, n).f32.view(n, HEADS.num_kv, group, HEADS.dim)
    chosen, gate = step.expected(), torch.sigmoid(step.gate.double()).view(n, HEADS.num_kv, group, HEADS.dim)
    for s in step.sequences:
        for row in range(s.row, s.row + s.count):
            seen = s.slots[: s.position + row - s.row + 1].tolist()
            for head in range(HEADS.num_kv):
                slots = chosen.get((row, head if rule.by_head else 0), seen)
                alone, one = Sequence(0, 1, len(slots) - 1, torch.tensor(slots)), slice(head, head + 1)
                q = step.attended_q[row : row + 1].view(1, HEADS.num_kv, group, HEADS.dim)[:, head]
                found = attention(q, step.kv.keys[:, one], step.kv.values[:, one], [alone])
                expected = found.reshape(group, HEADS.dim) * gate[row, head]
                assert nmse(out[row, head], expected) < 1e-12, (row, head)


@each_isa
@each_rule
@pytest.mark.parametrize("chunk", [1, 7, 33])
def test_chunks_and_company_do_not_change_a_bit(chunk: int, rule: ChoiceRule, isa: str) -> None:
    """The same rows alone, in pieces and in a crowd; as float32 and as the int8 that the next product reads."""
    step = Step(rule, [(0, 70), (1100, 20)])
    crowd = step.attended(isa, step.sequences, 0, 90)
    for s in step.sequences:
        for first in range(0, s.count, chunk):
            count = min(chunk, s.count - first)
            alone = Sequence(0, count, s.position + first, s.slots)
            out = step.attended(isa, [alone], s.row + first, count, threads=1)
            rows = slice(s.row + first, s.row + first + count)
            assert torch.equal(out.f32, crowd.f32[rows])
            assert torch.equal(out.q8, crowd.q8[rows])


@each_isa
@pytest.mark.parametrize("cut", [1, 3, 13])
@each_rule
def test_index_keys_and_queries_against_float64(rule: ChoiceRule, cut: int, isa: str) -> None:
    """However a sequence is cut into steps, the stored keys have the same bits."""
    generator = torch.Generator().manual_seed(3)
    n, heads = 50, HEADS.num_kv
    q, keys = (torch.randn(n, width, generator=generator) for width in (heads * DIM, DIM))
    q_norm, k_norm = (torch.randn(DIM, generator=generator) for _ in range(2))
    angles = torch.rand(n, ROTARY // 2, generator=generator) * 6
    slots = torch.randperm(2 * n, generator=generator)[:n].int()

    def stored(length: int) -> tuple[torch.Tensor, torch.Tensor]:
        pool, found, stream = torch.zeros(2 * n, 1, DIM).half(), q.clone(), stream_of(isa)
        for first in range(0, n, length):
            part = slice(first, min(first + length, n))
            one = (np.array([value], np.int32) for value in (0, part.stop - first, first, 0))
            plan, table = AttentionPlan(), slots.numpy()[None]
            build_attention_plan(plan, *one, table, HEADS, 2, rule=rule)
            kv, rows = KvLayer(pool, pool, index_keys=pool), found[part]
            stream.index_blocks(
                plan, rows, keys[part], q_norm, k_norm, EPS, angles.cos(), angles.sin(), kv, heads
            )
            stream.wait()
        return found, pool

    (found, pool), whole = stored(cut), stored(n)
    assert torch.equal(found, whole[0])
    assert torch.equal(pool, whole[1])
    expected_q = normed_and_rotated(q.view(n, heads, DIM), q_norm, EPS, angles.cos(), angles.sin())
    assert nmse(found, expected_q.reshape(n, -1)) < 1e-12
    expected = block_keys(keys, k_norm, EPS, angles.cos(), angles.sin(), rule)
    last = slots if rule.local else slots[rule.block - 1 :: rule.block]
    assert (pool[last.long(), 0].double() - expected).abs().max() < 5e-3
    unused = torch.ones(2 * n, dtype=torch.bool)
    unused[slots.long()] = False
    assert not pool[unused].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "heads: as many as KV heads, which choose, wanted"),
        ({"q": torch.zeros(7, 2 * DIM)}, "q: 85 rows wanted"),
        ({"rule": ChoiceRule(5, 0)}, "choice: 0 or more blocks of 1 or more keys wanted"),
        ({"rule": ChoiceRule(1 << 20, 1 << 20)}, "choice: 0 or more blocks"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_wrong_arguments_are_refused(changes: dict[str, object], message: str) -> None:
    step = Step(BY_MAXIMUM)
    step.rule = changes.get("rule", BY_MAXIMUM)  # type: ignore[assignment]
    with pytest.raises(ValueError, match=message):
        stream_of(ISAS[-1]).choose_keys(
            step.plan(step.sequences), changes.get("q", step.q), None, step.kv, changes.get("heads", 2)
        )


def test_heads_that_choose_have_no_sinks() -> None:
    step = Step(BY_MAXIMUM)
    stream, out = stream_of(ISAS[-1]), Activations(len(step.q), HEADS.num * HEADS.dim)
    with pytest.raises(ValueError, match="heads that choose have no sinks and no window"):
        stream.attention(
            step.plan(step.sequences), step.attended_q, step.kv, out, HEADS, sinks=torch.zeros(HEADS.num)
        )
