"""Compressed attention's operations on the CPU pool, beside their specification."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moeserve.kernels import _C
from moeserve.kernels.compressed import reference
from moeserve.kernels.compressed.plan import build_compressed_plan
from moeserve.kernels.compressed_operations import CompressorParameters, RowAngles
from moeserve.kernels.quantize.reference import quantize
from moeserve.kernels.stream_operands import (
    Activations,
    Heads,
    KvLayer,
    StateDrafts,
    StateLayer,
    StateSequences,
)
from tests.kernels.operations import ISAS, stream_of
from tests.kernels.weights import nmse

DIM, ROTARY, EPS, SLOTS, LENGTH = 96, 24, 1e-6, 200, 150
each_isa = pytest.mark.parametrize("isa", ISAS)


def angles_of(positions: torch.Tensor) -> tuple[reference.Angles, RowAngles]:
    turns = torch.arange(LENGTH)[:, None] * 1e4 ** (-torch.arange(ROTARY // 2) / (ROTARY // 2))
    return reference.Angles(turns.cos(), turns.sin()), RowAngles(turns.cos(), turns.sin(), positions)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Prompt:
    """One sequence's inputs to a compressor, and what comes out of it in pieces."""

    def __init__(self, isa: str, ratio: int, *, overlaps: bool) -> None:
        width = 2 * DIM if overlaps else DIM
        self.stream = stream_of(isa)
        self.kv, self.gate = torch.randn(LENGTH, width), 3 * torch.randn(LENGTH, width)
        self.w = CompressorParameters(torch.randn(ratio, width), torch.rand(DIM) + 0.5)
        self.slots = torch.randperm(SLOTS)[:LENGTH].int()
        self.ratio, self.width = ratio, width

    def expected(self) -> torch.Tensor:
        angles, _ = angles_of(ints())
        return reference.compress(self.kv, self.gate, self.w.bias, self.w.norm, EPS, angles)

    def start(self) -> None:
        self.states = StateLayer(torch.zeros(3, 3 * self.width + 8), 8)
        self.pool = torch.zeros(SLOTS, 1, 2 * DIM, dtype=torch.float16)

    def run(self, first: int, count: int, drafts: int = 0) -> torch.Tensor:
        _, rows = angles_of(torch.arange(first, first + count, dtype=torch.int32))
        part = slice(first, first + count)
        pending = torch.zeros(max(drafts, 1), 2 * self.width + 32)
        of_drafts = StateDrafts(ints(drafts), ints(0)) if drafts else None
        sequences = StateSequences(ints(0), ints(count), ints(2), of_drafts)
        self.stream.compress(
            self.kv[part].clone(), self.gate[part].clone(), self.w, EPS, rows, self.slots[part].clone(), self.pool, DIM,
            self.states, sequences, count, pending,
        )  # fmt: skip
        self.stream.wait()
        return pending

    def entries(self) -> torch.Tensor:
        last = torch.arange(self.ratio - 1, LENGTH, self.ratio)
        return self.pool[self.slots[last].long(), 0, DIM:]


@each_isa
@pytest.mark.parametrize(("ratio", "overlaps"), [(4, True), (16, False), (5, True)])
def test_entries_are_the_specification_s_however_a_prompt_is_cut(
    isa: str, ratio: int, overlaps: bool
) -> None:
    prompt = Prompt(isa, ratio, overlaps=overlaps)
    prompt.start()
    prompt.run(0, LENGTH)
    whole, state = prompt.entries().clone(), prompt.states.states.clone()
    assert nmse(whole, prompt.expected()) < 1e-6
    for step in (1, 7, 33):
        prompt.start()
        for first in range(0, LENGTH, step):
            prompt.run(first, min(step, LENGTH - first))
        assert torch.equal(prompt.entries(), whole)
        assert torch.equal(prompt.states.states, state)


@each_isa
@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("accepted", [0, 1, 3, 6])
def test_drafts_move_the_state_when_they_are_accepted(isa: str, overlaps: bool, accepted: int) -> None:
    """Six drafts behind two sure rows; of those that are not accepted nothing is left once their rows come again."""
    prompt = Prompt(isa, 4, overlaps=overlaps)
    prompt.start()
    prompt.run(0, LENGTH)
    whole, state = prompt.entries().clone(), prompt.states.states.clone()
    prompt.start()
    prompt.run(0, 101)
    pending = prompt.run(101, 8, drafts=6)
    args = (prompt.w, prompt.states, ints(2), ints(0), ints(accepted), pending)
    prompt.stream.commit_compressed(*args)
    prompt.stream.wait()
    prompt.run(103 + accepted, LENGTH - 103 - accepted)
    assert torch.equal(prompt.entries(), whole)
    assert torch.equal(prompt.states.states, state)


@each_isa
def test_store_and_rotate_back(isa: str) -> None:
    n, heads, index_heads, index_dim = 9, 4, 3, 64
    q, kv, norm = torch.randn(n, heads * DIM), torch.randn(n, DIM), torch.rand(DIM) + 0.5
    index_q, slots = torch.randn(n, index_heads * index_dim), torch.randperm(SLOTS)[:n].int()
    angles, rows = angles_of(torch.randperm(LENGTH)[:n].int())
    cos, sin = angles.cos[rows.positions.long()], angles.sin[rows.positions.long()]
    of_q = reference.queries(q.view(n, heads, DIM), EPS, 0.25, cos, sin)
    of_index = reference.rotate_tail(index_q.view(n, index_heads, index_dim), cos, sin)
    pool = torch.zeros(SLOTS, 1, 2 * DIM, dtype=torch.float16)
    stream = stream_of(isa)
    stream.compressed_store(
        q,
        kv,
        norm,
        EPS,
        0.25,
        rows,
        slots,
        KvLayer(pool, pool),
        n,
        heads,
        index_q=index_q,
        index_heads=index_heads,
    )
    stream.wait()
    assert nmse(q.view(n, heads, DIM), of_q) < 1e-11
    assert nmse(index_q.view(n, index_heads, index_dim), of_index) < 1e-11
    assert nmse(pool[slots.long(), 0, :DIM], reference.keys(kv, norm, EPS, cos, sin)) < 1e-6
    assert not pool[slots.long(), 0, DIM:].any()
    x = Activations(2 * n, heads // 2 * DIM)
    x.f32.normal_()
    turned = reference.rotate_back(x.f32.view(n, heads, DIM), cos, sin)
    stream.rotate_back(x, n, heads, DIM, rows)
    stream.wait()
    assert nmse(x.f32.view(n, heads, DIM), turned) < 1e-11
    assert torch.equal(x.q8, quantize(x.f32).rows())


@each_isa
@pytest.mark.parametrize(("ratio", "top"), [(0, 0), (16, 0), (4, 6)])
@pytest.mark.parametrize("first", [0, 5, 100])
def test_rows_attend_to_their_window_and_to_entries(isa: str, ratio: int, top: int, first: int) -> None:
    heads, window, count = 8, 20, LENGTH - first
    per_slot = 2 if ratio else 1
    pool = torch.randn(SLOTS, 1, per_slot * DIM).half()
    index_keys, index_q = torch.randn(SLOTS, 1, 32).half(), torch.randn(count, 3 * 32)
    weights, q, sinks = torch.randn(count, 3), torch.randn(count, heads * DIM), torch.randn(heads)
    table = np.random.default_rng(0).permutation(SLOTS)[:LENGTH].astype(np.int32)[None]
    plan, of_heads, stream = _C.CompressedPlan(), Heads(heads, 2, DIM, DIM, is_latent=True), stream_of(isa)
    columns = [np.array([value], np.int32) for value in (0, count, first, 0)]
    build_compressed_plan(
        *(plan, *columns, table, of_heads, stream.threads), window=window, ratio=ratio, top=top
    )
    if top:
        stream.choose_entries(plan, index_q, weights, KvLayer(pool, pool, index_keys=index_keys), 3)
    out, rows = Activations(count, heads * DIM, q8=False), pool.view(-1, 1, DIM)
    stream.attention(plan.attention, q, KvLayer(rows, rows), out, of_heads, sinks=sinks)
    stream.wait()
    slots = torch.from_numpy(table[0]).long()
    for row, position in enumerate(range(first, LENGTH)):
        own = slots[max(0, position - window + 1) : position + 1]
        attended = pool[own, 0, :DIM]
        if ratio:
            ends = slots[ratio - 1 : position + 1 : ratio]
            if top:
                ends = ends[
                    reference.chosen_entries(
                        index_q[row].view(3, 32), weights[row], index_keys[ends, 0], len(ends), top
                    )
                ]
            attended = torch.cat([pool[ends, 0, DIM:], attended])
        expected = reference.attend(q[row].view(heads, DIM), attended, sinks)
        assert nmse(out.f32[row].view(heads, DIM), expected) < 1e-9


def test_a_plan_beside_the_slot_table_is_refused() -> None:
    columns = [np.array([value], np.int32) for value in (0, 8, 5, 0)]
    with pytest.raises(IndexError, match="slot table"):
        build_compressed_plan(
            *(_C.CompressedPlan(), *columns, np.zeros((1, 12), np.int32), Heads(4, 1, DIM), 1), window=4
        )
