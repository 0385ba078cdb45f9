"""GLM-5.3-Flash on the GPU engine, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType as Type

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from tests.conftest import family_models
from tests.kernels.engines.model_engine import Fixture, distance
from tests.kernels.gpu.gpu_logits import load, logits_of
from tests.support.models.glm5next_model import logits, new_model, write_model

FIXTURES = family_models("glm5next")


@pytest.mark.slow  # two minutes of CPU time under the interpreter
@pytest.mark.parametrize("model", FIXTURES, ids=lambda model: model.stem)
def test_no_further_from_the_truth_than_llama_cpp(model: Path) -> None:
    """See test_indexed_families.py for what a mistake costs. In chunks whose products take floats; under the
    interpreter the first of the longest text, whose rows choose blocks from position 51 on."""
    fixture, runner = Fixture.load(model, model.parent), load(model)
    most = 512 if DEVICE == "cuda" else 90
    tokens, truth = fixture.tokens[-1][:most], fixture.truth[-1][:most]
    kl, agrees = distance(truth, logits_of(runner, 0, tokens, 33))
    print(f"median KL {kl.median():.2e}, top-1 {agrees.double().mean():.1%}")
    assert kl.median() <= fixture.llama_cpp["median_kl"]
    assert agrees.double().mean() >= fixture.llama_cpp["top1_agreement"] - 0.01


@pytest.mark.slow  # two minutes of CPU time under the interpreter
def test_chunks_beside_transformers(tmp_path: Path) -> None:
    """Blocks are chosen from position 31 on; chunks end within blocks."""
    model, tokens = new_model(8), [(37 * i * i + 11 * i) % 600 for i in range(52)]
    runner = load(write_model(model, tmp_path / "m.gguf", Type.F16))
    truth = logits(model, tokens)
    for slot, chunk in enumerate((20, 52)):
        kl, agrees = distance(truth, logits_of(runner, slot, tokens, chunk))
        print(f"chunks of {chunk}: median KL {kl.median():.2e}, top-1 {agrees.double().mean():.1%}")
        assert kl.median() < 1e-5
        assert agrees.double().mean() > 0.9
