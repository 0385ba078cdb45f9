"""A q8_0 KV cache on the CPU: what is stored, attention against float64, and the same bits however it is cut."""

from __future__ import annotations

from collections.abc import Sequence as List
from pathlib import Path
from typing import Any

import pytest
import torch

from moeserve.kernels.attention.reference import Sequence, attention
from moeserve.kernels.quantize.kv import dequantize_kv, quantize_kv
from moeserve.kernels.stream_operands import KvLayer
from moeserve.kv.layout import FLOAT16, Q8_0
from tests.conftest import OWN_FIXTURES, TINY_MODEL, family_models, wide_models
from tests.kernels.attention.attention_step import BORDERS, Step
from tests.kernels.engines.model_engine import Engine, Fixture, distances, own_fixture
from tests.kernels.operations import COSTLY_ISAS, ISAS, run_attention, run_rope_store, stream_of
from tests.kernels.weights import nmse

each_isa = pytest.mark.parametrize("isa", ISAS)
each_vector_isa = pytest.mark.parametrize("isa", COSTLY_ISAS)
# Queries are rounded to 16 bits, everything else is float32. (Queries of 8 bits: 1e-4.)
BOUND = 1e-8


class Q8Step(Step):
    """Keys and values of test_attention's step in q8_0; slots that hold nothing have NaN for scales."""

    def __init__(self, spans: List[tuple[int, int]], heads: int, kv_heads: int, dim: int) -> None:
        super().__init__(spans, heads, kv_heads, dim)
        (keys, key_scales), (values, value_scales) = quantize_kv(self.kv.keys), quantize_kv(self.kv.values)
        self.kv = KvLayer(keys, values, key_scales, value_scales)
        self.keys, self.values = dequantize_kv(keys, key_scales), dequantize_kv(values, value_scales)

    def expected(self, **options: Any) -> torch.Tensor:
        return attention(self.q, self.keys, self.values, self.sequences, **options)


@each_vector_isa
@pytest.mark.parametrize(("group", "dim"), [(1, 128), (2, 32), (4, 96), (8, 64)])
def test_borders_against_float64(isa: str, group: int, dim: int) -> None:
    kv_heads = 1 if group == 8 else 2
    step = Q8Step(BORDERS, group * kv_heads, kv_heads, dim)
    expected = step.expected()
    for split in (False, True):
        out = step.run(isa, split=split)
        for s in step.sequences:
            rows = slice(s.row, s.row + s.count)
            assert nmse(out[rows], expected[rows]) < BOUND, (s.position, s.count, split)


@each_isa
@pytest.mark.parametrize("window", [0, 1, 33, 1000])
def test_windows_sinks_and_gates(isa: str, window: int) -> None:
    step = Q8Step([(0, 20), (1030, 3), (2100, 1)], 8, 2, 64)
    g = torch.Generator().manual_seed(1)
    sinks, gate = torch.randn(8, generator=g), torch.randn(len(step.q), 8 * 64, generator=g)
    options = {"window": window, "sinks": sinks, "gate": gate}
    for split in (False, True):
        assert nmse(step.run(isa, split=split, **options), step.expected(**options)) < BOUND


@each_isa
def test_splitting_and_threads_do_not_change_a_bit(isa: str) -> None:
    step = Q8Step([(0, 40), (1030, 1), (2100, 20), (5, 1)], 8, 2, 64)
    whole = step.run(isa, 1, split=False)
    for threads in (1, 2, 3, 5):
        for split in (False, True, None):
            assert torch.equal(step.run(isa, threads, split=split), whole)


@each_isa
@pytest.mark.parametrize("window", [0, 100])
def test_chunks_alone_and_in_a_crowd_the_same_bits(isa: str, window: int) -> None:
    """A prompt of 70 after 1000 cached tokens, beside others: at once, in chunks, token by token."""
    step = Q8Step([(40, 1), (1000, 70), (0, 20)], 4, 2, 128)
    crowd, s = step.run(isa, 3, window=window), step.sequences[1]
    for chunk in (1, 7, 16, 33, 70):
        for first in range(0, 70, chunk):
            part = Sequence(0, min(chunk, 70 - first), 1000 + first, s.slots)
            rows = slice(s.row + first, s.row + first + part.count)
            alone = run_attention(stream_of(isa), step.q[rows].contiguous(), step.kv, [part], window=window)
            assert torch.equal(alone.f32, crowd[rows])


@pytest.mark.skipif(not {"avx2", "avx512_vnni"} <= set(ISAS), reason="this CPU does not have both")
def test_vector_instruction_sets_give_the_same_bits() -> None:
    step = Q8Step([(0, 40), (1030, 1)], 8, 2, 96)
    assert torch.equal(step.run("avx2"), step.run("avx512_vnni"))


def store(isa: str, k: torch.Tensor, v: torch.Tensor) -> KvLayer:
    """What is in slots 2, 0 and 1 after they were given k and v, [3, kv_heads, dim], without rotation."""
    n, kv_heads, dim = k.shape
    codes = torch.full((4, kv_heads, dim), 7, dtype=torch.int8)
    scales = torch.full((4, kv_heads, dim // 32), 7.0, dtype=torch.float16)
    kv = KvLayer(codes, codes.clone(), scales, scales.clone())
    tables = torch.ones(n, dim // 2), torch.zeros(n, dim // 2)
    slots = torch.tensor([2, 0, 1], dtype=torch.int32)
    run_rope_store(stream_of(isa), (k, k, v), (None, None), 1e-6, tables, slots, kv)
    return kv


def reference_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = quantize_kv(x)
    return codes[[1, 2, 0]], scales[[1, 2, 0]]


@each_isa
@pytest.mark.parametrize("size", [1e-12, 1e-6, 1.0, 1e4])
def test_what_is_stored_is_the_reference_s(isa: str, size: float) -> None:
    """Down to where float16 has no scale for it, and in no other slot."""
    g = torch.Generator().manual_seed(3)
    k, v = torch.randn(3, 2, 96, generator=g) * size, torch.randn(3, 2, 96, generator=g) * size
    v[0] = 0.0
    kv = store(isa, k, v)
    for codes, scales, x in ((kv.keys, kv.key_scales, k), (kv.values, kv.value_scales, v)):
        assert scales is not None
        expected, of_each = reference_of(x)
        assert torch.equal(codes[:3], expected)
        assert torch.equal(scales[:3], of_each)
        assert (codes[3] == 7).all()
        assert (scales[3] == 7).all()


@each_isa
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e8])
def test_what_is_not_finite_in_16_bits_stays_visible(isa: str, bad: float) -> None:
    k = torch.ones(3, 1, 64)
    v = k.clone()
    v[0, 0, 40] = bad
    kv = store(isa, k, v)
    assert kv.value_scales is not None
    kept = dequantize_kv(kv.values, kv.value_scales)
    assert not kept[2, 0, 32:].isfinite().all()
    assert kept[2, 0, :32].isfinite().all()
    step = Q8Step([(0, 1)], 2, 1, 64)
    slot = step.sequences[0].slots[0]
    assert step.kv.value_scales is not None
    step.kv.value_scales[slot, 0, 1] = kv.value_scales[2, 0, 1]
    out = step.run(isa)
    assert not out[0, 32:64].isfinite().any()
    assert out[0, :32].isfinite().all()


def test_the_rounding_error_is_half_a_code() -> None:
    x = torch.randn(50, 128, generator=torch.Generator().manual_seed(0))
    codes, scales = quantize_kv(x)
    apart = (dequantize_kv(codes, scales) - x.double()).abs() / scales.double().repeat_interleave(32, dim=-1)
    assert apart.max() < 0.5 + 127 * 2**-11  # the largest, where the scale was rounded down
    assert codes.abs().max() == 127


# ---------------------------------------------------------------- whole models


@each_isa
def test_chunks_and_threads_do_not_change_a_bit_of_a_model(isa: str) -> None:
    tokens = own_fixture().tokens[0][:60]
    whole = Engine(stream_of(isa), TINY_MODEL, kv_dtype=Q8_0).logits(tokens)
    other = Engine(stream_of(isa, 3), TINY_MODEL, kv_dtype=Q8_0)
    for chunk in (1, 7, 32):
        assert torch.equal(other.logits(tokens, chunk), whole)
    assert not torch.equal(Engine(stream_of(isa), TINY_MODEL).logits(tokens), whole)


OWN = [TINY_MODEL, *(OWN_FIXTURES / f"tiny-{name}-q4_k_m.gguf" for name in ("qwen2moe", "qwen3next"))]
FAMILIES = ("qwen2moe", "qwen3", "gptoss", "glm4moe", "minimaxm2", "qwen3next", "qwen35moe")


def assert_hardly_further_from_the_truth(models: List[Path]) -> None:
    """Over the positions of all: a model's own 200 leave its ratio uncertain by 15%."""
    found: dict[str, list[torch.Tensor]] = {"f16": [], "q8_0": []}
    for model in models:
        fixture = Fixture.load(model, model.parent)
        for name, kv_dtype in (("f16", FLOAT16), ("q8_0", Q8_0)):
            found[name].append(distances(fixture, ISAS[-1], kv_dtype)[0])
        f16, q8_0 = (found[name][-1].median().item() for name in found)
        print(f"| {model.stem} | {f16:.2e} | {q8_0:.2e} | {q8_0 / f16:.2f} |")
    f16, q8_0 = (torch.cat(found[name]).median().item() for name in found)
    print(f"| all together | {f16:.2e} | {q8_0:.2e} | {q8_0 / f16:.2f} |")
    assert q8_0 <= 1.3 * f16


def test_quantised_models_are_hardly_further_from_the_truth() -> None:
    assert_hardly_further_from_the_truth(OWN)


@pytest.mark.slow  # 40 s
def test_all_quantised_fixtures_are_hardly_further_from_the_truth(wide_fixtures: Path) -> None:
    """But for models of floats, of whose errors KV's is the largest."""
    models = [*wide_models(), *(model for family in FAMILIES for model in family_models(family))]
    assert_hardly_further_from_the_truth([model for model in models if not model.stem.endswith("f16")])
