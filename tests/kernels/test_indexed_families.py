"""Families whose attention chooses keys, computed with all of them: right up to as many as would be chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import family_models
from tests.kernels.model_engine import Engine, Fixture, distance
from tests.kernels.operations import COSTLY_ISAS, ISAS, stream_of

MODELS = [model for family in ("glmdsa", "minimaxm3", "qwen4exp") for model in family_models(family)]


@pytest.mark.parametrize("isa", COSTLY_ISAS)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.stem)
def test_no_further_from_the_truth_up_to_the_chosen_number_of_keys(model: Path, isa: str) -> None:
    fixture, engine = Fixture.load(model, model.parent), Engine(stream_of(isa), model)
    served = engine.config.context_length
    found = [
        distance(truth[:served], engine.logits(tokens[:served]))
        for truth, tokens in zip(fixture.truth, fixture.tokens, strict=True)
    ]
    kl, agrees = (torch.cat(column) for column in zip(*found, strict=True))
    assert kl.median() <= fixture.llama_cpp["median_kl"]
    assert kl.max() < 10 * fixture.llama_cpp["median_kl"]
    assert agrees.all()


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.stem)
def test_chunks_and_threads_do_not_change_a_bit(model: Path) -> None:
    engine, other = Engine(stream_of(ISAS[-1]), model), Engine(stream_of(ISAS[-1], 3), model)
    tokens = Fixture.load(model, model.parent).tokens[-1][: engine.config.context_length]
    whole = engine.logits(tokens)
    for chunk in (1, 7, 33):
        assert torch.equal(other.logits(tokens, chunk), whole)
