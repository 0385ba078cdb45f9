"""The indexer of sparse attention on the CPU against its reference: index keys, the choice, and attention to it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moeserve.kernels.attention.cpu_plan import build_attention_plan
from moeserve.kernels.attention.reference import Sequence, attention
from moeserve.kernels.choice_rule import ChoiceRule
from moeserve.kernels.cpu_stream import AttentionPlan
from moeserve.kernels.indexer.reference import choose_keys, index_scores, index_store
from moeserve.kernels.stream_operands import Activations, Heads, KvLayer
from tests.kernels.operations import ISAS, stream_of
from tests.kernels.weights import nmse

each_isa = pytest.mark.parametrize("isa", ISAS)
DIM, TOP = 64, 24
LATENT = Heads(4, 2, 128, 96, is_latent=True)
# position and count of each sequence: below, at and beyond the number of chosen keys; beyond a segment of scores
SPANS = [(0, 30), (TOP - 1, 2), (TOP, 1), (100, 40), (2050, 3), (7, 5)]


class Step:
    """The sequences of a step. Index keys, queries and weights are small integers, so that sums are exact and many
    scores are equal; unused slots hold NaN."""

    def __init__(self, spans: list[tuple[int, int]] = SPANS, heads: int = 3, levels: int = 2) -> None:
        generator = torch.Generator().manual_seed(heads)
        used, rows = sum(p + n for p, n in spans), sum(n for _, n in spans)
        pool = torch.randperm(2 * used, generator=generator).int()

        def integers(*shape: int) -> torch.Tensor:
            return torch.randint(-levels, levels + 1, shape, generator=generator).float()

        self.heads = heads
        self.sequences, row, slot = [], 0, 0
        for position, count in spans:
            self.sequences.append(Sequence(row, count, position, pool[slot : slot + position + count]))
            row, slot = row + count, slot + position + count
        self.q, self.weights = integers(rows, heads * DIM), integers(rows, heads)
        index_keys = integers(2 * used, 1, DIM).half()
        keys = torch.randn(2 * used, 1, LATENT.dim, generator=generator).half()
        for tensor in (index_keys, keys):
            tensor[pool[used:].long()] = float("nan")
        self.kv = KvLayer(keys, keys[:, :, : LATENT.value_width], index_keys=index_keys)
        self.attended_q = torch.randn(rows, LATENT.num, LATENT.dim, generator=generator) / LATENT.dim**0.5

    def plan(self, sequences: list[Sequence], threads: int = 2, top: int = TOP) -> AttentionPlan:
        columns = (
            np.array(column, np.int32)
            for column in zip(*((s.row, s.count, s.position) for s in sequences), strict=True)
        )
        self.table = np.zeros((len(sequences), max(len(s.slots) for s in sequences)), np.int32)
        for at, s in enumerate(sequences):
            self.table[at, : len(s.slots)] = s.slots.numpy()
        plan, each = AttentionPlan(), np.arange(len(sequences), dtype=np.int32)
        build_attention_plan(plan, *columns, each, self.table, LATENT, threads, rule=ChoiceRule(top))
        return plan

    def chosen(self, isa: str, threads: int = 2) -> dict[int, list[int]]:
        """The KV slots of the chosen keys, of each row that chooses."""
        stream, plan = stream_of(isa, threads), self.plan(self.sequences)
        stream.choose_keys(plan, self.q, self.weights, self.kv, self.heads)
        stream.wait()
        return dict(plan.chosen)

    def expected(self) -> dict[int, list[int]]:
        assert self.kv.index_keys is not None
        found = {}
        for s in self.sequences:
            for row in range(s.row, s.row + s.count):
                slots = s.slots[: s.position + row - s.row + 1]
                if len(slots) > TOP:
                    q = self.q[row].view(self.heads, DIM)
                    scores = index_scores(q, self.weights[row], self.kv.index_keys[slots.long(), 0])
                    found[row] = slots[choose_keys(scores, TOP)].tolist()
        return found

    def attended(
        self, isa: str, sequences: list[Sequence], first: int, count: int, threads: int = 2
    ) -> Activations:
        """Attention of rows first .. first + count - 1, to which `sequences` are relative."""
        stream, plan = stream_of(isa, threads), self.plan(sequences, threads)
        rows, out = slice(first, first + count), Activations(count, LATENT.num * LATENT.value_width)
        q = self.q[rows].contiguous(), self.weights[rows].contiguous()
        stream.choose_keys(plan, *q, self.kv, self.heads)
        stream.attention(plan, self.attended_q[rows].contiguous(), self.kv, out, LATENT)
        stream.wait()
        return out


@each_isa
@pytest.mark.parametrize("heads", [1, 3, 16])
def test_the_same_keys_as_the_reference(isa: str, heads: int) -> None:
    step = Step(heads=heads)
    expected = step.expected()
    assert len(expected) > 50
    for threads in (1, 3):
        assert step.chosen(isa, threads) == expected


@each_isa
def test_of_equal_scores_the_first_positions_are_chosen(isa: str) -> None:
    """Without a positive product, every score is 0."""
    step = Step([(100, 1)])
    step.q.zero_()
    (keys,) = step.chosen(isa).values()
    assert keys == step.sequences[0].slots[:TOP].tolist()


@each_isa
def test_scores_of_either_sign_are_in_order(isa: str) -> None:
    step = Step([(300, 2)], levels=40)
    assert (step.weights < 0).any()
    assert step.chosen(isa) == step.expected()


def test_rows_whose_scores_do_not_fit_together_are_scored_in_turns() -> None:
    """300 rows with 15,000 keys each: more than are held at once (kMostScores in key_choice.h)."""
    step = Step([(15_000, 300)], heads=1)
    found, expected = step.chosen(ISAS[-1]), step.expected()
    assert found == expected


@each_isa
def test_attention_to_the_chosen_keys_against_float64(isa: str) -> None:
    step = Step()
    n = len(step.q)
    out = step.attended(isa, step.sequences, 0, n).f32
    chosen = step.expected()
    for s in step.sequences:
        for row in range(s.row, s.row + s.count):
            slots = chosen.get(row, s.slots[: s.position + row - s.row + 1].tolist())
            alone = Sequence(0, 1, len(slots) - 1, torch.tensor(slots))
            expected = attention(step.attended_q[row : row + 1], step.kv.keys, step.kv.values, [alone])
            assert nmse(out[row : row + 1], expected.reshape(1, -1)) < 1e-12, row


@each_isa
@pytest.mark.parametrize("chunk", [1, 7, 33])
def test_chunks_and_company_do_not_change_a_bit(isa: str, chunk: int) -> None:
    """The same rows alone, in pieces and in a crowd."""
    step = Step([(0, 70), (1100, 20)])
    crowd = step.attended(isa, step.sequences, 0, 90).f32
    for s in step.sequences:
        for first in range(0, s.count, chunk):
            count = min(chunk, s.count - first)
            alone = Sequence(0, count, s.position + first, s.slots)
            out = step.attended(isa, [alone], s.row + first, count, threads=1)
            assert torch.equal(out.f32, crowd[s.row + first : s.row + first + count])


@each_isa
@pytest.mark.parametrize("in_pairs", [True, False])
def test_index_keys_and_queries_against_float64(isa: str, in_pairs: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    n, heads, rotary, eps = 5, 3, 32, 1e-6
    q, keys = (torch.randn(n, width, generator=generator) for width in (heads * DIM, DIM))
    keys += 3.0  # a mean, which LayerNorm removes
    norm, bias = (torch.randn(DIM, generator=generator) for _ in range(2))
    angles = torch.rand(9, rotary // 2, generator=generator) * 6
    positions, slots = torch.tensor([4, 0, 8, 2, 2]).int(), torch.tensor([7, 1, 0, 3, 9]).int()
    pool, expected_pool = torch.zeros(10, 1, DIM).half(), torch.zeros(10, 1, DIM).double()
    at = positions.long()
    expected = index_store(
        q.view(n, heads, DIM), keys, norm, bias, eps, angles[at].cos(), angles[at].sin(), slots, expected_pool,
        in_pairs=in_pairs,
    )  # fmt: skip
    stream, found = stream_of(isa), q.clone()
    stream.index_store(
        found, keys, norm, bias, eps, angles.cos(), angles.sin(), slots, KvLayer(pool, pool, index_keys=pool), n,
        heads, in_pairs=in_pairs, positions=positions,
    )  # fmt: skip
    stream.wait()
    assert nmse(found, expected.reshape(n, -1)) < 1e-12
    assert (pool.double() - expected_pool).abs().max() < 2e-3
    assert torch.equal(pool[[2, 4, 5, 6, 8]], torch.zeros(5, 1, DIM).half())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(170, DIM)}, "q: rows of 192 elements wanted"),
        ({"weights": torch.zeros(3, 3)}, "weights: 81 rows wanted"),
        ({"index_keys": torch.zeros(8, 1, 48).half()}, "keys: rows of 32 to 1024 elements that 32 divides"),
        ({"top": 0}, "plan: one that was built with a number of keys to choose wanted"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_wrong_arguments_are_refused(changes: dict[str, torch.Tensor | int], message: str) -> None:
    step = Step()
    of = {"q": step.q, "weights": step.weights, "index_keys": step.kv.index_keys, "top": TOP} | changes
    plan = step.plan(step.sequences, top=of["top"])
    kv = KvLayer(step.kv.keys, step.kv.values, index_keys=of["index_keys"])
    with pytest.raises(ValueError, match=message):
        stream_of(ISAS[-1]).choose_keys(plan, of["q"], of["weights"], kv, 3)
