"""The samplers beside llama.cpp's on the same logits, as `tests/support/worker/llama_cpp_samplers.py` has
recorded them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moeserve.httpserver.generation.resolve.dry_breakers import closed_breakers
from moeserve.kernels.sampling import reference
from moeserve.kernels.sampling.cpu import SamplerState
from moeserve.kernels.sampling.reference import Params
from moeserve.models.sources.gguf import open_gguf
from moeserve.sampling.parameters import PARAMETERS
from moeserve.tokenizer.text_tokenizer import TextTokenizer
from tests.support.worker.sampling_cases import arguments_of, bind

REPOSITORY = Path(__file__).parents[3]
RECORD: dict[str, Any] = json.loads((REPOSITORY / "tests/fixtures/llama_cpp_samplers.json").read_text())
DRAWS = 20_000


def params_of(case: dict[str, Any], **more: Any) -> Params:
    settings = {name: value for name, value in case.items() if name in PARAMETERS}
    return Params(**settings, order=tuple(case.get("order", ())), **more)


def quantile(freedom: int) -> float:
    """The 99.99% quantile of chi-square (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.719 * np.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize(
    "case", [case for case in RECORD["chains"] if "ids" in case], ids=lambda c: str(c["order"])
)
def test_the_same_tokens_are_left_with_the_same_probabilities(case: dict[str, Any]) -> None:
    logits, p = torch.tensor(case["logits"]), params_of(case)
    state = SamplerState(1, len(logits))
    bind(state, 0, p)
    ids, weights = state.survivors(logits[None], 0)
    assert ids.tolist() == case["ids"]
    np.testing.assert_allclose(weights / weights.sum(), case["probabilities"], atol=2e-6)
    assert reference.survivors(logits, p)[0].tolist() == case["ids"]


@pytest.mark.parametrize(
    "case", [case for case in RECORD["chains"] if "drawn" in case], ids=lambda c: str(c["order"])
)
def test_where_chance_decides_both_draw_from_one_distribution(case: dict[str, Any]) -> None:
    """Chi-square of two samples of 20,000 draws."""
    logits, p = torch.tensor(case["logits"]), params_of(case, seed=11)
    state, slot = SamplerState(1, len(logits)), np.zeros(1, np.int32)
    bind(state, 0, p)
    tokens = [int(state.sample(logits[None], slot)[0][0]) for _ in range(DRAWS)]
    ours, theirs = np.bincount(tokens, minlength=len(logits)), np.array(case["drawn"])
    assert ours.sum() == theirs.sum() == DRAWS
    both = ours + theirs
    rare = both < 20  # too few for the statistic: one class
    ours, theirs = (np.append(x[~rare], x[rare].sum()) for x in (ours, theirs))
    both = ours + theirs
    kept = both > 0
    statistic = ((ours - theirs)[kept] ** 2 / both[kept]).sum()
    assert statistic < quantile(int(kept.sum()) - 1)
    assert len(set(tokens)) > 3


@pytest.mark.parametrize("case", RECORD["dry"], ids=lambda c: c["text"][:40])
def test_dry_subtracts_the_same_from_the_same_tokens(case: dict[str, Any]) -> None:
    tokenizer = TextTokenizer.from_gguf(open_gguf(REPOSITORY / "moeserve/assets/moeserve-demo-q8_0.gguf"))
    assert tokenizer.encode(case["text"]) == case["tokens"]
    arguments = arguments_of(params_of(case, prompt=case["tokens"]))
    arguments["dry_breakers"] = np.frombuffer(closed_breakers(tokenizer, tuple(case["breakers"])), np.int32)
    state = SamplerState(1, tokenizer.vocabulary.size)
    state.bind(0, **arguments)
    logits = torch.zeros(1, tokenizer.vocabulary.size)
    ids, weights = state.survivors(logits, 0)
    expected = np.zeros(len(ids))
    expected[[int(token) for token in case["penalties"]]] = [*case["penalties"].values()]
    # The weight of a token is e to the minus penalty; below 2^-126 it is 0.
    likely = expected < 80
    assert (weights[~likely] < 1e-34).all()
    np.testing.assert_allclose(
        -np.log(weights[likely].astype(np.float64)), expected[likely], rtol=1e-5, atol=2e-5
    )
