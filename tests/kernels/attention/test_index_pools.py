"""Pooled index keys on the CPU against their reference: what is stored, and the choice by it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from moeserve.kernels.attention.cpu_plan import build_attention_plan
from moeserve.kernels.choice_rule import ChoiceRule
from moeserve.kernels.cpu_stream import AttentionPlan
from moeserve.kernels.indexer.pools import pooled_keys
from moeserve.kernels.indexer.reference import choose_keys, index_scores
from moeserve.kernels.stream_operands import Heads, KvLayer
from tests.kernels.operations import ISAS, stream_of
from tests.kernels.weights import nmse

each_isa = pytest.mark.parametrize("isa", ISAS)
DIM, INDEX_HEADS, EPS = 64, 3, 1e-6
HEADS = Heads(8, 2, 96, is_latent=True)
RULES = {"pools of four": ChoiceRule(5, 4), "pools of sixteen": ChoiceRule(2, 16)}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
LENGTHS = (90, 61)  # tokens of the sequences


class Texts:
    """Sequences whose tokens come in several steps, with slots beside those of NaN."""

    def __init__(self, rule: ChoiceRule) -> None:
        generator = torch.Generator().manual_seed(3)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.rule, total = rule, sum(LENGTHS)
        slots = torch.randperm(2 * total, generator=generator).int()[:total]
        self.slots = slots.split(LENGTHS)
        self.keys, self.gates, self.q, self.weights = (
            numbers(total, width).split(LENGTHS) for width in (DIM, DIM, INDEX_HEADS * DIM, INDEX_HEADS)
        )
        self.norm, self.bias, self.ape = 1 + 0.3 * numbers(DIM), numbers(DIM), numbers(rule.block, DIM)
        pool = torch.full((2 * total, 1, 2 * DIM), float("nan"), dtype=torch.float16)
        unused = torch.empty(2 * total, 1, 96, dtype=torch.float16)
        self.kv = KvLayer(unused, unused[:, :, :64], index_keys=pool)
        self.table = np.zeros((len(LENGTHS), max(LENGTHS)), np.int32)
        for row, each in zip(self.table, self.slots, strict=True):
            row[: len(each)] = each.numpy()

    def step(self, isa: str, spans: list[tuple[int, int]], threads: int = 2) -> list[dict[int, list[int]]]:
        """Takes tokens `first` to `end` of each sequence. Returns by sequence the slots that a position chose."""
        counts = np.array([end - first for first, end in spans], np.int32)
        firsts = np.array([first for first, _ in spans], np.int32)
        rows, each = np.cumsum(counts, dtype=np.int32) - counts, np.arange(len(spans), dtype=np.int32)
        plan, stream = AttentionPlan(), stream_of(isa, threads)
        build_attention_plan(plan, rows, counts, firsts, each, self.table, HEADS, threads, rule=self.rule)

        def of_rows(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
            return torch.cat([part[first:end] for part, (first, end) in zip(parts, spans, strict=True)])

        stream.index_pools(
            plan, of_rows(self.keys), of_rows(self.gates), self.norm, self.bias, EPS, self.ape, self.kv
        )
        stream.choose_keys(plan, of_rows(self.q), of_rows(self.weights), self.kv, INDEX_HEADS)
        stream.wait()
        found: list[dict[int, list[int]]] = [{} for _ in spans]
        for row, slots in plan.chosen:
            of = int(np.searchsorted(rows, row, side="right")) - 1
            found[of][spans[of][0] + row - int(rows[of])] = slots
        return found

    def stored(self, sequence: int) -> torch.Tensor:
        assert self.kv.index_keys is not None
        return self.kv.index_keys[self.slots[sequence].long(), 0]


@each_isa
@each_rule
def test_the_same_keys_and_the_same_choice_as_the_reference(rule: ChoiceRule, isa: str) -> None:
    texts = Texts(rule)
    chosen = texts.step(isa, [(0, length) for length in LENGTHS])
    for sequence, length in enumerate(LENGTHS):
        keys, gates = texts.keys[sequence], texts.gates[sequence]
        expected = pooled_keys(keys, gates, texts.norm, texts.bias, EPS, texts.ape)
        pooled = texts.stored(sequence)[rule.block - 1 :: rule.block, :DIM]
        assert nmse(pooled, expected) < 1e-6  # float16
        assert set(chosen[sequence]) == set(range(rule.most_dense, length))
        for position, slots in chosen[sequence].items():
            q = texts.q[sequence][position].view(INDEX_HEADS, DIM)
            blocks = rule.scored_blocks(position)
            scores = index_scores(q, texts.weights[sequence][position], pooled[:blocks])
            attended = [
                *(
                    b * rule.block + i
                    for b in choose_keys(scores, rule.top).tolist()
                    for i in range(rule.block)
                ),
                *range(blocks * rule.block, position + 1),
            ]
            assert slots == texts.slots[sequence][torch.tensor(attended)].tolist()


@each_isa
@each_rule
def test_steps_and_threads_do_not_change_a_bit(rule: ChoiceRule, isa: str) -> None:
    """Also with rows that are computed again, as after rejected drafts."""
    whole, other = Texts(rule), Texts(rule)
    expected = whole.step(isa, [(0, length) for length in LENGTHS], 1)
    found: list[dict[int, list[int]]] = [{} for _ in LENGTHS]
    at, sizes = 0, [1, 7, rule.block, 2, 33, 50]
    while at < max(LENGTHS):
        size = sizes.pop(0)
        spans = [(max(0, min(at, n) - 2), min(at + size, n)) for n in LENGTHS]
        for of, more in zip(found, other.step(isa, spans, 3), strict=True):
            of.update(more)
        at += size
    assert found == expected
    for sequence in range(len(LENGTHS)):
        assert torch.equal(whole.stored(sequence), other.stored(sequence))


@each_isa
def test_a_place_in_the_block_counts(isa: str) -> None:
    texts, other = Texts(RULES["pools of four"]), Texts(RULES["pools of four"])
    other.ape = other.ape.roll(1, 0)
    for each in (texts, other):
        each.step(isa, [(0, length) for length in LENGTHS])
    assert not torch.equal(texts.stored(0)[3, :DIM], other.stored(0)[3, :DIM])
    assert torch.equal(texts.stored(0)[2], other.stored(0)[2])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rule": ChoiceRule()}, "plan: one that was built with a number of keys to choose"),
        ({"rule": ChoiceRule(2, 16, 1)}, "plan: one without local blocks"),
        ({"keys": torch.zeros(9, 48)}, "keys: rows of 32 to 1024 elements that 32 divides"),
        ({"gates": torch.zeros(9, 32)}, "gates: rows of 64 elements wanted, not 32"),
        ({"ape": torch.zeros(3, 64)}, "ape: 256 elements wanted"),
        ({"index_keys": torch.zeros(302, 1, 64, dtype=torch.float16)}, "kv.index_keys: rows of 128 elements wanted"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_arguments_that_do_not_fit(changes: dict[str, Any], said: str) -> None:
    texts, plan = Texts(RULES["pools of four"]), AttentionPlan()
    one = [np.array([value], np.int32) for value in (0, 9, 0, 0)]
    build_attention_plan(plan, *one, texts.table, HEADS, 2, rule=changes.get("rule", texts.rule))
    arguments = {"keys": torch.zeros(9, 64), "gates": torch.zeros(9, 64), "ape": texts.ape} | changes
    kv = replace(texts.kv, index_keys=changes.get("index_keys", texts.kv.index_keys))
    keys, gates, ape = (arguments[name] for name in ("keys", "gates", "ape"))
    with pytest.raises(ValueError, match=said):
        stream_of(ISAS[-1]).index_pools(plan, keys, gates, texts.norm, texts.bias, EPS, ape, kv)
