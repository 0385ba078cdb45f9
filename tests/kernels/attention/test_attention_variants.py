"""What some families' attention has beside the usual, on the CPU pool: narrower values, gates by head, norms behind the
rotation, q alone."""

from __future__ import annotations

import pytest
import torch

from moeserve.kernels.attention.reference import Sequence, attention
from moeserve.kernels.norm.reference import norm
from moeserve.kernels.rope.reference import rotate
from moeserve.kernels.stream_operands import Activations, Heads, KvLayer
from tests.kernels.operations import ISAS, run_attention, stream_of
from tests.kernels.weights import nmse

each_isa = pytest.mark.parametrize("isa", ISAS)
N, SLOTS, EPS = 5, 70, 1e-6
NARROW = Heads(6, 2, 96, 64)


def pool(heads: Heads, slots: int = SLOTS) -> KvLayer:
    g = torch.Generator().manual_seed(3)
    return KvLayer(
        torch.randn(slots, heads.num_kv, heads.dim, generator=g).half(),
        torch.randn(slots, heads.num_kv, heads.value_width, generator=g).half(),
    )


@each_isa
@pytest.mark.parametrize("threads", [1, 16])
@pytest.mark.parametrize("context", [40, 1500])
def test_values_may_be_narrower_than_keys(isa: str, threads: int, context: int) -> None:
    """Whole and in segments, shared by heads and by columns."""
    kv, slots = pool(NARROW, context), torch.randperm(context).int()
    sequences = [Sequence(0, 3, context - 3, slots), Sequence(3, 1, 30, slots)]
    q = torch.randn(4, NARROW.num, NARROW.dim) / 10
    out = run_attention(stream_of(isa, 2), q, kv, sequences, window=33, heads=NARROW, plan_threads=threads)
    assert nmse(out.f32, attention(q, kv.keys, kv.values, sequences, window=33)) < 1e-10


@each_isa
@pytest.mark.parametrize("threads", [1, 16])
@pytest.mark.parametrize("context", [40, 1500])
def test_scores_are_capped(isa: str, threads: int, context: int) -> None:
    """Whole and in segments, shared by heads and by columns; the same bits whoever else is in the step."""
    heads, cap = Heads(6, 2, 64), 3.0
    kv, slots = pool(heads, context), torch.randperm(context).int()
    sequences = [Sequence(0, 3, context - 3, slots), Sequence(3, 1, 30, slots)]
    q = torch.randn(4, heads.num, heads.dim) / 2  # scores of about 4
    options = {"window": 33, "score_cap": cap}
    out = run_attention(stream_of(isa, 2), q, kv, sequences, heads=heads, plan_threads=threads, **options)
    expected = attention(q, kv.keys, kv.values, sequences, **options)
    assert nmse(out.f32, expected) < 1e-10
    assert nmse(attention(q, kv.keys, kv.values, sequences, window=33), expected) > 1e-3
    alone = [Sequence(0, 1, context - 1, slots)]
    last = run_attention(stream_of(isa), q[2:3].contiguous(), kv, alone, heads=heads, **options)
    assert torch.equal(last.f32[0], out.f32[2])


def test_capped_scores_need_a_cache_of_16_bits() -> None:
    heads, slots = Heads(4, 2, 32), torch.arange(SLOTS, dtype=torch.int32)
    codes = torch.zeros(SLOTS, 2, 32, dtype=torch.int8)
    scales = torch.zeros(SLOTS, 2, 1, dtype=torch.float16)
    kv, q = KvLayer(codes, codes.clone(), scales, scales.clone()), torch.randn(1, 4, 32)
    for cap, layer in ((1.0, kv), (-1.0, pool(heads))):
        with pytest.raises(ValueError, match=r"^score_cap"):
            run_attention(stream_of(ISAS[-1]), q, layer, [Sequence(0, 1, 3, slots)], score_cap=cap)


@each_isa
@pytest.mark.parametrize("softplus", [False, True])
def test_a_gate_of_a_head(isa: str, softplus: bool) -> None:
    heads = Heads(4, 2, 32)
    kv, slots = pool(heads), torch.randperm(SLOTS).int()
    sequences, q = [Sequence(0, N, 40, slots)], torch.randn(N, 4, 32) / 5
    gate = torch.randn(N, 4) * 20
    out = run_attention(stream_of(isa), q, kv, sequences, gate=gate, gate_softplus=softplus)
    expected = attention(q, kv.keys, kv.values, sequences, gate=gate, gate_softplus=softplus)
    assert nmse(out.f32, expected) < 1e-10
    if softplus:
        with pytest.raises(ValueError, match=r"^gate: softplus"):
            run_attention(stream_of(isa), q, kv, sequences, gate=torch.randn(N, 128), gate_softplus=True)


@each_isa
def test_norms_behind_the_rotation_and_scaled_values(isa: str) -> None:
    heads, slots = NARROW, torch.tensor([3, 0, 4, 1, 2], dtype=torch.int32)
    q, k, v = torch.randn(N, 6, 96), torch.randn(N, 2, 96), torch.randn(N, 2, 64)
    q_norm, k_norm, angle = torch.randn(96), torch.randn(96), torch.randn(N, 16)
    cos, sin = angle.cos(), angle.sin()
    expected_q = norm(rotate(q.double(), cos.double(), sin.double()), q_norm, EPS) * 0.3
    expected_k = norm(rotate(k.double(), cos.double(), sin.double()), k_norm, EPS)
    kv, found, stream = pool(heads), q.clone(), stream_of(isa)
    stream.rope_store(
        found, k.clone(), v.clone(), q_norm, k_norm, EPS, cos, sin, slots, kv, N, heads, scale=0.3, v_scale=0.7,
        norm_after=True,
    )  # fmt: skip
    stream.wait()
    assert nmse(found, expected_q) < 1e-10
    assert nmse(kv.keys[slots.long()].double(), expected_k) < 1e-6
    assert nmse(kv.values[slots.long()].double(), 0.7 * v.double()) < 1e-6
    with pytest.raises(ValueError, match=r"^q_norm"):
        stream.rope_store(
            found, k, v, torch.randn(6 * 96), None, EPS, cos, sin, slots, kv, N, heads, norm_after=True
        )


def test_q_alone_leaves_the_pool_as_it_is() -> None:
    heads, slots = Heads(4, 2, 32), torch.arange(N, dtype=torch.int32)
    q, k, v, angle = torch.randn(N, 4, 32), torch.randn(N, 2, 32), torch.randn(N, 2, 32), torch.randn(N, 16)
    weight, stream = torch.randn(32), stream_of(ISAS[-1])
    alone, both, kv, other = q.clone(), q.clone(), pool(heads), pool(heads)
    tables = (angle.cos(), angle.sin())
    stream.rope_store(alone, None, None, weight, None, EPS, *tables, slots, kv, N, heads)
    stream.rope_store(both, k, v, weight, weight, EPS, *tables, slots, other, N, heads)
    stream.wait()
    assert torch.equal(alone, both)
    untouched = pool(heads)
    assert torch.equal(kv.keys, untouched.keys)
    assert torch.equal(kv.values, untouched.values)
    assert not torch.equal(other.keys, untouched.keys)


@each_isa
def test_a_gelu_gate_of_some_columns(isa: str) -> None:
    gate, up, out = torch.randn(N, 64) * 3, torch.randn(N, 192), Activations(N, 64)
    stream = stream_of(isa)
    stream.gelu_gate(gate, up, 64, N, out)
    stream.wait()
    expected = torch.nn.functional.gelu(gate.double(), approximate="tanh") * up[:, 64:128].double()
    assert nmse(out.f32, expected) < 1e-10
    stream.gelu_gate(None, up, 128, N, out)
    stream.wait()
    assert torch.equal(out.f32, up[:, 128:])
    with pytest.raises(ValueError, match=r"^column"):
        stream.gelu_gate(gate, up, 160, N, out)
