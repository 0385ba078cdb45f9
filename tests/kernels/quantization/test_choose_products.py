"""The choice of products by measurement: it changes which form of them computes, and no bit of what is computed."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.phase_times import operation_names, phase_times, time_phases
from moeserve.quantization import QUANT_TYPES
from tests.kernels.experts.expert_layer import HIDDEN, Layer, routing
from tests.kernels.operations import NARROWER, is_usable, load, needs_both, run_linear, stream_of
from tests.kernels.weights import ACTIVATIONS, CPU_INTEGERS, activations, random_weights

KINDS = (Type.Q4_K, Type.Q8_0, Type.IQ3_S)
READ_IN_ORDER = [t for t in CPU_INTEGERS if QUANT_TYPES[t].codebook is None and t != Type.TQ1_0]
IN_ORDER, TO_L2 = "avx512_in_order", "prefetch_to_l2"
READERS = {"avx2": "avx2_in_order", "avx_vnni": "avx_vnni_in_order", "avx512_vnni": IN_ORDER}


def most_in_order(kind: int) -> int:
    """Tokens for which there is a product that reads in order. kind: ggml's number."""
    layout = QUANT_TYPES[kind].layout
    if kind not in READ_IN_ORDER or layout is None:
        return 0
    return 4 if layout.low.bits == 8 else 2


MUCH = 1 << 40  # bytes of weights: more than any cache


@pytest.fixture(scope="module")
def chosen() -> CpuStream:
    """A pool that computes few tokens' products of KINDS in their fastest other form and all else with AVX-512, by VBMI
    where it can."""
    stream = CpuStream(2, "avx512_vbmi" if is_usable("avx512_vbmi") else "avx512_vnni")
    choices = [c for kind in KINDS for c in stream.choose_products([kind], MUCH, least_gain=0.0)]
    expected = [*product(KINDS[:2], (1, 2, 3, 4, 8)), *product(KINDS[2:], (1, 2, 3, 4))]
    assert [(c.type, c.tokens) for c in choices] == expected
    assert {c.form for c in choices} <= {NARROWER, IN_ORDER, TO_L2}
    assert {c.form for c in choices if c.type == Type.IQ3_S} == {NARROWER}
    assert [c.form for c in choices if c.tokens == 8] == [TO_L2] * 2
    assert min(min(c.speeds) for c in choices) > 0
    return stream


@needs_both
def test_forms_that_cannot_be_chosen_are_measured_twice() -> None:
    """No form gains a hundredfold: of one token four are measured, of more two, and each twice."""
    stream = CpuStream(1, "avx512_vnni")
    time_phases(stream.pool, 1000)
    stream.choose_products([Type.Q4_K], MUCH, least_gain=100.0)
    (times,) = phase_times(stream.pool)
    names = operation_names(stream.pool)
    assert [names[time["operation"]] for time in times].count("TimedProductsOp") == 2 * (4 + 4 * 2)


@needs_both
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 67])
def test_linear(chosen: CpuStream, kind: Type, tokens: int) -> None:
    weights, x = random_weights(kind, 70, 768), load(activations("heavy-tailed", tokens, 768))
    plain = stream_of("avx512_vnni")
    assert torch.equal(
        run_linear(chosen, x, [weights.pack(chosen)])[0], run_linear(plain, x, [weights.pack(plain)])[0]
    )


@needs_both
def test_experts(chosen: CpuStream) -> None:
    layer, y = Layer.random(Type.Q4_K, Type.Q4_K, Type.Q8_0), activations("heavy-tailed", 3, HIDDEN)
    assert torch.equal(layer.run(chosen, y, *routing(3)), layer.run(stream_of("avx512_vnni"), y, *routing(3)))


@needs_both
def test_known_speeds_decide_and_are_not_measured() -> None:
    stream = CpuStream(2, "avx512_vnni")
    known = {
        Type.Q4_K: [[77.0, 78.0, 1.0], [77.0, 0.5, 78.0], [0.5, 0.5], [0.5], [77.0]],
        Type.Q8_0: [[0.5, 0.5, 0.5], *[[0.5]] * 4],
        Type.IQ3_S: [[77.0], [0.5]],
    }
    speeds = stream.choose_products([*known], MUCH, known=known)
    assert all(speed.is_known for speed in speeds)
    assert [(s.type, s.tokens, s.form, s.speeds) for s in speeds] == [
        *((Type.Q4_K, 1, IN_ORDER, [77.0, 78.0, 1.0]), (Type.Q4_K, 2, TO_L2, [77.0, 0.5, 78.0])),
        *((Type.Q4_K, 3, "avx512_vnni", [0.5, 0.5]), (Type.Q4_K, 4, "avx512_vnni", [0.5])),
        *((Type.Q4_K, 8, TO_L2, [77.0]), (Type.Q8_0, 1, "avx512_vnni", [0.5, 0.5, 0.5])),
        *((Type.Q8_0, n, "avx512_vnni", [0.5]) for n in (2, 3, 4, 8)),
        *((Type.IQ3_S, 1, NARROWER, [77.0]), (Type.IQ3_S, 2, "avx512_vnni", [0.5])),
    ]
    weights, plain = random_weights(Type.Q4_K, 70, 768), stream_of("avx512_vnni")
    for tokens in (2, 5, 16, 17, 67):
        x = load(activations("heavy-tailed", tokens, 768))
        expected = run_linear(plain, x, [weights.pack(plain)])[0]
        assert torch.equal(run_linear(stream, x, [weights.pack(stream)])[0], expected)


@needs_both
@pytest.mark.parametrize(
    "known",
    [
        *([], [[77.0] * 3], [[77.0] * 3] * 2 + [[77.0] * 2] * 2, [[0.5]], [[77.0]] * 5, [[0.5] * 4]),
        [[0.5] * 3, *[[0.5]] * 3],
    ],
)
def test_known_speeds_that_leave_a_choice_open_are_measured(known: list[list[float]]) -> None:
    speeds = CpuStream(1, "avx512_vnni").choose_products([Type.Q8_0], MUCH, known={Type.Q8_0: known})
    assert speeds
    assert not any(speed.is_known or 77.0 in speed.speeds for speed in speeds)


@pytest.mark.parametrize("isa", READERS)
@pytest.mark.parametrize("kind", READ_IN_ORDER, ids=lambda kind: kind.name)
def test_reading_in_order_gives_the_same_bits(kind: Type, isa: str) -> None:
    """With a last panel of six rows."""
    if not is_usable(isa):
        pytest.skip(f"this CPU has no {isa}")
    stream, own = CpuStream(2, isa), stream_of(isa)
    most, others = most_in_order(kind), int(isa != "avx2" and is_usable("avx2"))
    known = [[0.5] * others + [77.0, 0.5]] * most
    if most < 4:
        known.append([0.5] * others + [0.5])
    known += [[0.5]] * (5 - len(known))
    forms = stream.choose_products([kind], MUCH, known={kind: known})
    expected_forms = [READERS[isa]] * most + [isa] * (5 - most)
    assert [(form.tokens, form.form) for form in forms] == list(
        zip((1, 2, 3, 4, 8), expected_forms, strict=True)
    )
    weights = random_weights(kind, 70, 768)
    for distribution, tokens in product(ACTIVATIONS, range(1, most + 1)):
        x = load(activations(distribution, tokens, 768) * 3)
        expected = run_linear(own, x, [weights.pack(own)])[0]
        assert torch.equal(run_linear(stream, x, [weights.pack(stream)])[0], expected)


@needs_both
def test_types_that_can_be_read_in_order_are_measured_first() -> None:
    """A type with a codebook may take all the time that there is."""
    slower = [[0.5] * 3, *[[0.5]] * 4]
    known = {Type.IQ3_S: [[0.5]], Type.Q4_K: slower, Type.Q8_0: slower}
    speeds = CpuStream(1, "avx512_vnni").choose_products([*known], MUCH, known=known)
    assert [*dict.fromkeys(speed.type for speed in speeds)] == [Type.Q4_K, Type.Q8_0, Type.IQ3_S]


@needs_both
def test_weights_that_caches_hold_are_not_measured() -> None:
    assert CpuStream(1).choose_products([Type.Q4_K], 1 << 20, least_gain=0.0) == []


def test_without_a_second_vector_instruction_set_there_is_no_choice() -> None:
    assert CpuStream(1, "plain").choose_products([Type.Q4_K], MUCH, least_gain=0.0) == []


def test_types_without_integer_products_and_unknown_ones_keep_their_own() -> None:
    assert CpuStream(1).choose_products([Type.F32, Type.BF16, 99], MUCH, least_gain=0.0) == []


@pytest.mark.parametrize("isa", READERS)
@pytest.mark.parametrize("kind", READ_IN_ORDER, ids=lambda kind: kind.name)
def test_prefetching_into_the_second_level_gives_the_same_bits(kind: Type, isa: str) -> None:
    if not is_usable(isa):
        pytest.skip(f"this CPU has no {isa}")
    stream, own = CpuStream(2, isa), stream_of(isa)
    others = 1 + int(isa != "avx2" and is_usable("avx2"))
    known = [[0.5] * others + [0.5], *[[0.5]] * 3, [77.0]]
    forms = stream.choose_products([kind], MUCH, known={kind: known})
    assert [form.form for form in forms] == [isa] * 4 + [TO_L2]
    weights = random_weights(kind, 70, 768)
    for tokens in (5, 16, 67):
        x = load(activations("heavy-tailed", tokens, 768) * 3)
        expected = run_linear(own, x, [weights.pack(own)])[0]
        assert torch.equal(run_linear(stream, x, [weights.pack(stream)])[0], expected)
