"""Latent attention on the CPU against float64, and the same bits however it is cut; the absorbed form against what it
stands for."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type

from moeserve.kernels._C import AttentionPlan
from moeserve.kernels.attention.cpu_plan import build_attention_plan
from moeserve.kernels.attention.reference import Sequence, attention
from moeserve.kernels.latent.reference import latent_store, linear_by_head, rotate_pairs
from moeserve.kernels.quantize.reference import quantize
from moeserve.kernels.stream_operands import Activations, Heads, KvLayer
from moeserve.models.latent import LatentAttentionShape
from tests.kernels.attention.attention_step import BORDERS
from tests.kernels.operations import ISAS, load, run_attention, stream_of
from tests.kernels.weights import nmse, random_weights

each_isa = pytest.mark.parametrize("isa", ISAS)
RANK, ROTARY = 96, 32


class Step:
    """The sequences of a step, their vectors scattered over a pool, everything else in it poisoned."""

    def __init__(self, spans: list[tuple[int, int]], heads: int) -> None:
        generator = torch.Generator().manual_seed(heads)
        used, dim = sum(position + count for position, count in spans), RANK + ROTARY
        pool = torch.randperm(2 * used, generator=generator)
        self.sequences, row, slot = [], 0, 0
        for position, count in spans:
            self.sequences.append(Sequence(row, count, position, pool[slot : slot + position + count]))
            row, slot = row + count, slot + position + count
        keys = torch.randn(2 * used, 1, dim, generator=generator).half()
        keys[pool[used:]] = float("nan")
        self.kv = KvLayer(keys, keys[:, :, :RANK])
        self.q = torch.randn(row, heads, dim, generator=generator) / dim**0.5

    def run(self, isa: str, parts: int = 1, threads: int = 2, split: bool | None = None) -> Activations:
        return run_attention(
            stream_of(isa, threads), self.q, self.kv, self.sequences, split=split,
            heads=Heads(self.q.shape[1], parts, self.q.shape[2], RANK, is_latent=True),
        )  # fmt: skip


@each_isa
def test_attention_at_borders_against_float64(isa: str) -> None:
    step = Step(BORDERS, 4)
    expected = attention(step.q, step.kv.keys, step.kv.values, step.sequences)
    for split in (False, True):
        out = step.run(isa, split=split).f32.view(len(step.q), -1)
        for s in step.sequences:
            rows = slice(s.row, s.row + s.count)
            assert nmse(out[rows], expected[rows]) < 1e-12, (s.position, s.count, split)


@each_isa
def test_parts_threads_and_splitting_do_not_change_a_bit(isa: str) -> None:
    step = Step([(0, 40), (1030, 1), (2100, 20), (5, 1)], 12)
    whole = step.run(isa, threads=1, split=False)
    assert torch.equal(whole.q8, quantize(whole.f32).rows())
    for parts in (1, 2, 3, 12):
        for threads, split in ((1, True), (3, False), (5, None)):
            found = step.run(isa, parts, threads, split)
            assert torch.equal(found.f32, whole.f32)
            assert torch.equal(found.q8, whole.q8)


@each_isa
def test_parts_that_gather_their_keys_together_give_the_same_bits(isa: str) -> None:
    """As in decode steps of models with many heads: 32, in eight parts."""
    step = Step([(37, 1), (1100, 1)], 32)
    whole = step.run(isa, threads=1, split=False)
    for threads, together in ((1, 8), (2, 8), (3, 1), (4, 4), (32, 1)):
        plan, heads = AttentionPlan(), Heads(32, 8, RANK + ROTARY, RANK, is_latent=True)
        columns = (np.array(column, np.int32) for column in zip(*((0, 1, 37, 0), (1, 1, 7, 1)), strict=True))
        build_attention_plan(plan, *columns, np.zeros((2, 64), np.int32), heads, threads)
        assert plan.latent_together == together, threads
        assert torch.equal(step.run(isa, 8, threads).f32, whole.f32)


@each_isa
@pytest.mark.parametrize("chunk", [1, 7, 33])
def test_chunks_and_the_whole_give_the_same_bits(isa: str, chunk: int) -> None:
    step = Step([(1000, 70)], 4)
    whole, slots = step.run(isa).f32.view(70, -1), step.sequences[0].slots
    heads = Heads(4, 2, RANK + ROTARY, RANK, is_latent=True)
    for first in range(0, 70, chunk):
        count = min(chunk, 70 - first)
        rows, part = slice(first, first + count), Sequence(0, count, 1000 + first, slots)
        out = run_attention(stream_of(isa), step.q[rows].contiguous(), step.kv, [part], heads=heads)
        assert torch.equal(out.f32.view(count, -1), whole[rows])


@each_isa
def test_what_is_stored_and_what_becomes_of_q(isa: str) -> None:
    n, heads, nope, eps, scale = 5, 3, 64, 1e-6, 0.3
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(n, heads, nope + ROTARY, generator=generator)
    latent = torch.randn(n, RANK + ROTARY, generator=generator) * 3
    norm, angles = torch.rand(RANK, generator=generator), torch.randn(n, ROTARY // 2, generator=generator)
    cos, sin, slots = angles.cos(), angles.sin(), torch.tensor([7, 0, 3, 4, 9], dtype=torch.int32)
    keys = torch.full((10, 1, RANK + ROTARY), 5.0, dtype=torch.float64)
    expected_nope, rotated = latent_store(q, latent, norm, eps, cos, sin, slots, keys, scale)
    positions = torch.tensor([4, 3, 2, 1, 0], dtype=torch.int32)
    for threads, at, tables in (
        (1, None, (cos, sin)),
        (3, None, (cos, sin)),
        (3, positions, (cos.flip(0), sin.flip(0))),
    ):
        kv, room = KvLayer(keys.new_full(keys.shape, 5.0).half(), keys), Activations(n * heads, nope)
        queries = torch.full((n, heads, RANK + ROTARY), 5.0)
        stream = stream_of(isa, threads)
        stream.latent_store(
            q, latent, norm, eps, *tables, slots, kv, n, heads, scale, room, queries.view(n, -1), positions=at
        )
        stream.wait()
        assert nmse(room.f32.view(n, heads, nope), expected_nope) < 1e-13
        assert torch.equal(room.q8, quantize(room.f32).rows())
        assert nmse(queries[..., RANK:], rotated) < 1e-13
        assert (queries[..., :RANK] == 5.0).all()
        torch.testing.assert_close(kv.keys.double(), keys, rtol=1e-3, atol=1e-4)


@each_isa
@pytest.mark.parametrize("kind", [Type.F16, Type.Q8_0, Type.Q5_0])
def test_products_by_head(isa: str, kind: Type) -> None:
    heads, rows, cols, between = 3, 64, 96, 32
    w = random_weights(kind, heads, rows, cols)
    for n in (1, 5, 70):
        x = torch.randn(n * heads, cols, generator=torch.Generator().manual_seed(n))
        acts, out = load(x), Activations(n, heads * (rows + between))
        out.f32.fill_(7.0)
        stream = stream_of(isa, 3)
        stream.linear_by_head(acts, n, w.pack(stream), out)
        stream.wait()
        found = out.f32.view(n, heads, -1)
        given = quantize(x).dequantize() if w.integer else x
        expected = linear_by_head(given.view(n, heads, cols), w.values())
        assert nmse(found[..., :rows], expected) < 1e-11
        assert (found[..., rows:] == 7.0).all()
        alone = Activations(1, heads * (rows + between))
        stream.linear_by_head(load(x[-heads:]), 1, w.pack(stream), alone)
        stream.wait()
        assert torch.equal(alone.f32.view(1, heads, -1)[..., :rows], found[-1:, :, :rows])


def test_the_absorbed_form_is_the_attention_it_stands_for() -> None:
    """Keys and values made of every latent vector, with the rotated key beside them, by head (the paper's equations
    9 to 19)."""
    n, heads, nope, value, scale = 9, 2, 32, 64, 0.1
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, latent, angles = normal(n, heads, nope + ROTARY), normal(n, RANK + ROTARY), normal(n, ROTARY // 2)
    k_b, v_b, norm = normal(heads, RANK, nope), normal(heads, value, RANK), torch.ones(RANK)
    keys = torch.zeros(n, 1, RANK + ROTARY, dtype=torch.float64)
    slots = torch.arange(n)
    q_nope, q_rotated = latent_store(q, latent, norm, 0.0, angles.cos(), angles.sin(), slots, keys, scale)
    queries = torch.cat([linear_by_head(q_nope, k_b), q_rotated], dim=-1)
    attended = attention(queries, keys, keys[..., :RANK], [Sequence(0, n, 0, slots)])
    found = linear_by_head(attended.view(n, heads, RANK), v_b)

    c = keys[:, 0, :RANK]
    rotated = rotate_pairs(latent[:, None, RANK:], angles.cos(), angles.sin()).expand(n, heads, ROTARY)
    k = torch.cat([torch.einsum("tr,hrd->thd", c, k_b), rotated], dim=-1)
    v = torch.einsum("tr,hvr->thv", c, v_b)
    own = torch.cat([q[..., :nope], rotate_pairs(q[..., nope:], angles.cos(), angles.sin())], dim=-1) * scale
    expected = attention(own, k, v, [Sequence(0, n, 0, slots)]).view(n, heads, value)
    torch.testing.assert_close(found, expected)


def test_heads_are_cut_into_equal_parts_of_at_most_eight() -> None:
    def parts(heads: int) -> int:
        return LatentAttentionShape(heads, 0, 512, 128, 64, 128, 1.0).head_parts

    assert [parts(heads) for heads in (1, 2, 8, 16, 20, 64, 128)] == [1, 1, 1, 2, 4, 8, 16]
    assert all(heads % parts(heads) == 0 for heads in range(1, 130))
    assert all(a <= 8 * parts(a) for a, _ in pairwise(range(1, 130)))
