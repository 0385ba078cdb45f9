"""The whole model: forward passes on each instruction set against the float32 truth, and that truth against
Hugging Face's own implementation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.stream_operands import ThreadPlacement
from moeserve.models.registry import read_shape
from moeserve.models.sources.gguf import open_gguf
from tests.conftest import TINY_MODEL, wide_models
from tests.kernels.engines.model_engine import (
    Engine,
    Fixture,
    assert_no_further_from_the_truth_than_llama_cpp,
    distance,
    hugging_face_model,
    own_fixture,
)
from tests.kernels.operations import COSTLY_ISAS, ISAS, stream_of

if TYPE_CHECKING:
    pass


@pytest.mark.parametrize("isa", ISAS)
def test_no_further_from_the_truth_than_llama_cpp(isa: str) -> None:
    assert_no_further_from_the_truth_than_llama_cpp(own_fixture(), isa)


@pytest.mark.parametrize("isa", COSTLY_ISAS)
@pytest.mark.parametrize(
    "model", [model for model in wide_models() if model.name != TINY_MODEL.name], ids=lambda model: model.stem
)
def test_wider_fixtures(model: Path, isa: str) -> None:
    assert_no_further_from_the_truth_than_llama_cpp(Fixture.load(model, model.parent), isa)


@pytest.mark.parametrize("isa", ISAS)
def test_chunks_and_threads_do_not_change_a_bit(isa: str) -> None:
    tokens = own_fixture().tokens[0][:60]
    whole = Engine(stream_of(isa), TINY_MODEL).logits(tokens)
    other = Engine(stream_of(isa, 3), TINY_MODEL)
    for chunk in (1, 7, 32):
        assert torch.equal(other.logits(tokens, chunk), whole)


@pytest.mark.parametrize("isa", ISAS)
def test_where_the_weights_lie_does_not_change_a_bit(isa: str) -> None:
    """Packed, in the mapped file, divided among two NUMA nodes."""
    tokens = own_fixture().tokens[2]
    two_nodes = CpuStream([ThreadPlacement(0), ThreadPlacement(1)], isa)
    packed = Engine(stream_of(isa), TINY_MODEL).logits(tokens)
    assert torch.equal(Engine(stream_of(isa), TINY_MODEL, in_place=True).logits(tokens), packed)
    assert torch.equal(Engine(two_nodes, TINY_MODEL).logits(tokens), packed)
    assert torch.equal(Engine(two_nodes, TINY_MODEL, in_place=True).logits(tokens), packed)


@pytest.mark.skipif(not {"avx2", "avx512_vnni"} <= set(ISAS), reason="this CPU does not have both")
def test_vector_instruction_sets_give_the_same_bits() -> None:
    tokens = own_fixture().tokens[1]
    a, b = (Engine(stream_of(isa), TINY_MODEL).logits(tokens) for isa in ("avx2", "avx512_vnni"))
    assert torch.equal(a, b)


# ---------------------------------------------------------------- Hugging Face


def test_the_truth_is_hugging_faces() -> None:
    """The fixture's truth, recomputed; and with it our reading of the file, layout and names included."""
    fixture, file = own_fixture(), open_gguf(TINY_MODEL)
    model = hugging_face_model(file, read_shape(file))
    for tokens, truth in zip(fixture.tokens, fixture.truth, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0]
        kl, agrees = distance(truth, logits)
        assert kl.median() < 1e-6  # the fixture holds float16
        assert agrees.double().mean() > 0.99
