"""Compressed attention's operations on the CPU pool, beside their specification."""

from __future__ import annotations

from itertools import accumulate, chain, cycle, pairwise, takewhile

import numpy as np
import numpy.typing as npt
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
    KeyRings,
    KvLayer,
    StateDrafts,
    StateLayer,
    StateSequences,
)
from tests.kernels.operations import ISAS, stream_of
from tests.kernels.weights import nmse

DIM, ROTARY, EPS, SLOTS, LENGTH = 96, 24, 1e-6, 200, 150
RINGS = KeyRings(first=SLOTS, rows=28, num=2)
each_isa = pytest.mark.parametrize("isa", ISAS)


def angles_of(positions: torch.Tensor) -> tuple[reference.Angles, RowAngles]:
    turns = torch.arange(LENGTH)[:, None] * 1e4 ** (-torch.arange(ROTARY // 2) / (ROTARY // 2))
    return reference.Angles(turns.cos(), turns.sin()), RowAngles(turns.cos(), turns.sin(), positions)


def plan_of(
    count: int,
    position: int,
    slots: npt.NDArray[np.int32] | None = None,
    heads: Heads | None = None,
    *,
    window: int,
    ratio: int = 0,
    top: int = 0,
) -> _C.CompressedPlan:
    """One sequence, whose state has slot 1."""
    plan = _C.CompressedPlan()
    columns = [np.array([value], np.int32) for value in (0, count, position, 0, 1)]
    table = np.zeros((1, position + count), np.int32) if slots is None else slots[None]
    of_heads = Heads(4, 1, DIM) if heads is None else heads
    build_compressed_plan(*(plan, *columns, table, RINGS, of_heads, 2), window=window, ratio=ratio, top=top)
    return plan


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
        self.pool = torch.zeros(SLOTS, 1, DIM, dtype=torch.float16)

    def run(self, first: int, count: int, drafts: int = 0) -> torch.Tensor:
        _, rows = angles_of(torch.arange(first, first + count, dtype=torch.int32))
        part = slice(first, first + count)
        pending = torch.zeros(max(drafts, 1), 2 * self.width + 32)
        of_drafts = StateDrafts(ints(drafts), ints(0)) if drafts else None
        sequences = StateSequences(ints(0), ints(count), ints(2), of_drafts)
        self.stream.compress(
            self.kv[part].clone(), self.gate[part].clone(), self.w, EPS, rows, self.slots[part].clone(), self.pool,
            self.states, sequences, count, pending,
        )  # fmt: skip
        self.stream.wait()
        return pending

    def entries(self) -> torch.Tensor:
        last = torch.arange(self.ratio - 1, LENGTH, self.ratio)
        return self.pool[self.slots[last].long(), 0]


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
    index_q = torch.randn(n, index_heads * index_dim)
    angles, rows = angles_of(torch.randperm(LENGTH)[:n].int())
    cos, sin = angles.cos[rows.positions.long()], angles.sin[rows.positions.long()]
    of_q = reference.queries(q.view(n, heads, DIM), EPS, 0.25, cos, sin)
    of_index = reference.rotate_tail(index_q.view(n, index_heads, index_dim), cos, sin)
    pool, plan = torch.zeros(RINGS.end, 1, DIM, dtype=torch.float16), plan_of(n, 3, window=5)
    stream = stream_of(isa)
    stream.compressed_store(
        q,
        kv,
        norm,
        EPS,
        0.25,
        rows,
        plan,
        KvLayer(pool, pool),
        n,
        heads,
        index_q=index_q,
        index_heads=index_heads,
    )
    stream.wait()
    assert nmse(q.view(n, heads, DIM), of_q) < 1e-11
    assert nmse(index_q.view(n, index_heads, index_dim), of_index) < 1e-11
    at = RINGS.first + RINGS.rows + torch.arange(3, 3 + n) % RINGS.rows
    assert nmse(pool[at, 0], reference.keys(kv, norm, EPS, cos, sin)) < 1e-6
    assert pool.any(dim=2).sum() == n
    x = Activations(2 * n, heads // 2 * DIM)
    x.f32.normal_()
    turned = reference.rotate_back(x.f32.view(n, heads, DIM), cos, sin)
    stream.rotate_back(x, n, heads, DIM, rows)
    stream.wait()
    assert nmse(x.f32.view(n, heads, DIM), turned) < 1e-11
    assert torch.equal(x.q8, quantize(x.f32).rows())


@each_isa
@pytest.mark.parametrize(("ratio", "top"), [(0, 0), (16, 0), (4, 6)])
@pytest.mark.parametrize("steps", [(LENGTH,), (100, 1, 9, 40), (17,)], ids=str)
def test_rows_attend_to_their_window_and_to_entries(
    isa: str, ratio: int, top: int, steps: tuple[int, ...]
) -> None:
    """The last tokens' keys are in a ring; those of a step for which that has no room are first behind the rings."""
    heads, window = 8, RINGS.rows - 8
    keys = torch.randn(LENGTH, DIM).half()
    pool = torch.randn(RINGS.end + LENGTH, 1, DIM).half()
    index_keys, index_q = torch.randn(SLOTS, 1, 32).half(), torch.randn(LENGTH, 3 * 32)
    weights, q, sinks = torch.randn(LENGTH, 3), torch.randn(LENGTH, heads * DIM), torch.randn(heads)
    slots = torch.randperm(SLOTS)[:LENGTH]
    table = slots.int().numpy()
    of_heads, stream = Heads(heads, 2, DIM, DIM, is_latent=True), stream_of(isa)
    layer, found = KvLayer(pool, pool, index_keys=index_keys, rings=RINGS), []
    cuts = list(takewhile(lambda end: end < LENGTH, accumulate(chain([0], cycle(steps)))))
    for start, end in pairwise([*cuts, LENGTH]):
        plan = plan_of(end - start, start, table, of_heads, window=window, ratio=ratio, top=top)
        pool[plan.key_rows, 0] = keys[start:end]
        if top:
            stream.choose_entries(plan, index_q[start:end], weights[start:end], layer, 3)
        out = Activations(end - start, heads * DIM, q8=False)
        stream.attention(plan.attention, q[start:end], layer, out, of_heads, sinks=sinks)
        stream.keep_keys(plan, layer)
        stream.wait()
        found.append(out.f32.clone())
    for position, row in enumerate(torch.cat(found)):
        attended = keys[max(0, position - window + 1) : position + 1]
        if ratio:
            ends = slots[ratio - 1 : position + 1 : ratio]
            if top:
                of_row = index_q[position].view(3, 32), weights[position], index_keys[ends, 0]
                ends = ends[reference.chosen_entries(*of_row, len(ends), top)]
            attended = torch.cat([pool[ends, 0], attended])
        expected = reference.attend(q[position].view(heads, DIM), attended, sinks)
        assert nmse(row.view(heads, DIM), expected) < 1e-9


def test_a_plan_beside_the_slot_table_is_refused() -> None:
    columns = [np.array([value], np.int32) for value in (0, 8, 5, 0)]
    with pytest.raises(IndexError, match="slot table"):
        build_compressed_plan(
            *(_C.CompressedPlan(), *columns, np.zeros(1, np.int32), np.zeros((1, 12), np.int32), RINGS),
            *(Heads(4, 1, DIM), 1),
            window=4,
        )


@pytest.mark.parametrize("slot", [-1, RINGS.num])
def test_a_plan_without_a_ring_is_refused(slot: int) -> None:
    columns = [np.array([value], np.int32) for value in (0, 8, 0, 0, slot)]
    with pytest.raises(IndexError, match="no state slot"):
        build_compressed_plan(
            *(_C.CompressedPlan(), *columns, np.zeros((1, 12), np.int32), RINGS, Heads(4, 1, DIM), 1),
            window=4,
        )
