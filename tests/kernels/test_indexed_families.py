"""Families whose attention chooses keys, computed with all of them: right up to as many as would be chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import family_models
from tests.kernels.model_engine import Engine, Fixture, distance
from tests.kernels.operations import COSTLY_ISAS, stream_of


@pytest.mark.parametrize("isa", COSTLY_ISAS)
@pytest.mark.parametrize("model", family_models("glmdsa"), ids=lambda model: model.stem)
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
