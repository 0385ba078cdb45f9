"""The vector instruction sets give the same bits as one another; plain C++ may differ from them in rounding alone.

All three run the same code over another vector vocabulary (csrc/arch/simd.h), in the same order. The plain one has no
fused multiply-add. So a fleet of mixed x86 machines gives the same answers.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.routing.options import RouterOptions
from moeserve.quantization import QUANT_TYPES
from tests.kernels.attention.attention_step import Step as AttentionStep
from tests.kernels.attention.rope_step import Step as RopeStep
from tests.kernels.experts.expert_layer import HIDDEN, Layer, routing
from tests.kernels.operations import (
    ISAS,
    is_usable,
    load,
    needs_both,
    run_linear,
    run_norm,
    run_route,
    run_shared_gate,
    stream_of,
)
from tests.kernels.weights import ACTIVATIONS, CPU_INTEGERS, TYPES, activations, random_weights


def assert_same_bits(run: Callable[[str], list[torch.Tensor]]) -> None:
    for a, b in zip(run("avx2"), run("avx512_vnni"), strict=True):
        assert torch.equal(a, b)


@needs_both
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_linear(kind: Type) -> None:
    weights = random_weights(kind, 70, 768)
    for distribution in ACTIVATIONS:
        x = load(activations(distribution, 67, 768) * 3)
        assert_same_bits(lambda isa, x=x: run_linear(stream_of(isa), x, [weights.pack(stream_of(isa))]))


needs_vbmi = pytest.mark.skipif(not is_usable("avx512_vbmi"), reason="this CPU lacks AVX-512 VBMI")


@needs_vbmi
@pytest.mark.parametrize("kind", [t for t in TYPES if QUANT_TYPES[t].codebook], ids=lambda kind: kind.name)
def test_codebooks_by_byte_permutations(kind: Type) -> None:
    """Packed and as in the file, with numbers of tokens on both sides of where AVX-512's own kernels take over."""
    weights, (avx2, vbmi) = random_weights(kind, 70, 768), map(stream_of, ("avx2", "avx512_vbmi"))
    for distribution in ACTIVATIONS:
        for tokens in (1, 2, 3, 4, 5, 24, 67):
            x = load(activations(distribution, tokens, 768) * 3)
            expected = run_linear(avx2, x, [weights.pack(avx2)])[0]
            for matrix in (weights.pack(vbmi), weights.view(vbmi)):
                assert torch.equal(run_linear(vbmi, x, [matrix])[0], expected)


@needs_vbmi
def test_the_widest_instruction_set_is_chosen() -> None:
    assert CpuStream(1).isa == "avx512_vbmi"


@pytest.mark.skipif(not is_usable("avx_vnni"), reason="this CPU lacks AVX-VNNI")
@pytest.mark.parametrize("kind", CPU_INTEGERS, ids=lambda kind: kind.name)
def test_products_by_avx_vnni(kind: Type) -> None:
    """Packed and as in the file, with as many tokens as each form's tiles hold and more."""
    weights, (avx2, vnni) = random_weights(kind, 70, 768), map(stream_of, ("avx2", "avx_vnni"))
    for distribution in ACTIVATIONS:
        for tokens in (1, 2, 3, 4, 5, 6, 24, 67):
            x = load(activations(distribution, tokens, 768) * 3)
            expected = run_linear(avx2, x, [weights.pack(avx2)])[0]
            for matrix in (weights.pack(vnni), weights.view(vnni)):
                assert torch.equal(run_linear(vnni, x, [matrix])[0], expected)


@needs_both
@pytest.mark.parametrize("kinds", [(Type.Q4_K, Type.Q4_K, Type.Q6_K), (Type.IQ4_XS, Type.F16, Type.BF16)])
def test_experts(kinds: tuple[Type, Type, Type]) -> None:
    layer, y = Layer.random(*kinds), activations("heavy-tailed", 67, HIDDEN) * 5
    assert_same_bits(lambda isa: [layer.run(stream_of(isa), y, *routing(67))])
    assert_same_bits(lambda isa: [layer.run(stream_of(isa), y, *routing(67), activation="swiglu_oai")])


@needs_both
def test_norm_rope_attention_route() -> None:
    x, weight = activations("heavy-tailed", 33, 768), torch.rand(768)
    logits = activations("gaussian", 33, 128) * 4

    def norm(isa: str) -> list[torch.Tensor]:
        y = run_norm(stream_of(isa), x, weight, 1e-6)
        return [y.f32, y.q8]

    def rope(isa: str) -> list[torch.Tensor]:
        step = RopeStep(33, 4, 2, 128)
        return [step.run(isa), step.kv.keys, step.kv.values]

    def attention(isa: str) -> list[torch.Tensor]:
        step = AttentionStep([(0, 40), (1030, 1), (3, 1)], 8, 2, 128, sharpness=5.0)
        return [step.run(isa)]

    def route(isa: str) -> list[torch.Tensor]:
        room = run_route(stream_of(isa), logits, 8)
        return [room.ids, room.weights]

    def variants(isa: str) -> list[torch.Tensor]:
        step = AttentionStep([(0, 40), (1030, 1), (3, 1)], 8, 2, 128, sharpness=5.0)
        rope_step = RopeStep(33, 4, 2, 128, 64)
        rope_step.norms = torch.ones(4 * 128), torch.ones(2 * 128)
        router = RouterOptions("sigmoid", groups=8, top_groups=4)
        routed = run_route(stream_of(isa), logits, 8, router, torch.arange(128) / 100)
        gate = run_shared_gate(stream_of(isa), load(x), weight)
        attended = step.run(isa, window=37, sinks=torch.arange(8.0))
        return [attended, rope_step.run(isa), routed.ids, routed.weights, gate.weights]

    for operation in (norm, rope, attention, route, variants):
        assert_same_bits(operation)


def test_every_build_has_the_plain_kernels() -> None:
    assert ISAS[0] == "plain"
    assert stream_of("plain").isa == "plain"
