"""XTC, DRY, top-n-sigma, typical-p and orders of samplers: the C++ sampler against the specification."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from moeserve.kernels.sampling import reference
from moeserve.kernels.sampling.cpu import SamplerState, runs_by_lag, uniform_at
from moeserve.kernels.sampling.reference import Params
from moeserve.sampling.order import DEFAULT_ORDER, EDITS
from tests.support.worker.sampling_cases import (
    TINY,
    arguments_of,
    bind,
    random_logits,
    sample_one,
    survivors_of,
)


def random_settings(rng: np.random.Generator, vocab: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "temperature": float(rng.choice([0.0, 0.3, 0.7, 1.0, 1.0, 2.0])),
        "top_k": int(rng.choice([0, 0, 1, 2, 20, vocab // 2])),
        "top_p": float(rng.choice([1.0, 1.0, 0.5, 0.9, 0.999])),
        "min_p": float(rng.choice([0.0, 0.0, 0.02, 0.5])),
        "top_n_sigma": float(rng.choice([0.0, 0.0, 0.5, 1.0, 3.0])),
        "typical_p": float(rng.choice([1.0, 1.0, 0.2, 0.7, 0.95])),
        "xtc_probability": float(rng.choice([0.0, 0.5, 1.0])),
        "xtc_threshold": float(rng.choice([0.01, 0.1, 0.3, 0.6])),
        "seed": int(rng.integers(1 << 62)),
    }
    if rng.random() < 0.7:
        edits = [name for name in EDITS if rng.random() < 0.5]
        filters = rng.permutation(DEFAULT_ORDER[len(EDITS) :])[: rng.integers(1, len(DEFAULT_ORDER))]
        found["order"] = (*edits, *filters.tolist())
    return found


def test_any_order_lets_exactly_the_references_tokens_through() -> None:
    rng = np.random.default_rng(0)
    kept = set()
    for vocab in (1, 2, 17, 129, 1000, 2500):
        state = SamplerState(1, vocab)
        for _ in range(120):
            logits, p = random_logits(rng, vocab), Params(**random_settings(rng, vocab))
            if arguments_of(p)["order"] == 0 and arguments_of(p)["temperature"] == 0:
                continue  # the largest, without a filter
            ids, probabilities = reference.survivors(logits, p)
            possible = probabilities > probabilities.max() * TINY
            got, weights = survivors_of(state, logits, p)
            assert got == ids[possible].tolist(), p
            np.testing.assert_allclose(weights, probabilities[possible], rtol=2e-6)
            kept.add(len(got))
    assert len(kept) > 50


def test_draws_are_the_references() -> None:
    rng = np.random.default_rng(1)
    seen = set()
    for _ in range(1500):
        vocab = int(rng.choice([3, 40, 333]))
        output = rng.integers(0, vocab, rng.integers(0, 20)).tolist()
        edits = {"frequency_penalty": 0.5, "dry_multiplier": 0.7, "output": output}
        p = Params(**random_settings(rng, vocab), **edits)
        logits = random_logits(rng, vocab)
        expected = reference.sample(logits, p)
        assert sample_one(logits, p) == expected, p
        seen.add(expected)
    assert len(seen) > 100


@pytest.mark.parametrize("isa", ["plain", "avx2", "avx512_vnni"])
def test_the_instruction_set_changes_no_bit(isa: str) -> None:
    rng, vocab = np.random.default_rng(2), 1500
    try:
        states = [SamplerState(1, vocab, isa=isa), SamplerState(1, vocab)]
    except ValueError:
        pytest.skip(f"this CPU lacks {isa}")
    for _ in range(60):
        logits, p = random_logits(rng, vocab), Params(**random_settings(rng, vocab))
        for state in states:
            bind(state, 0, p)
        ours, best = (state.survivors(logits[None], 0) for state in states)
        assert ours[1].tobytes() == best[1].tobytes(), p


def test_xtc_happens_as_often_as_it_should_and_leaves_the_draws_number_alone() -> None:
    """One of the two tokens that XTC leaves out is drawn only where it does not happen; the draw's own number is the
    same with and without it."""
    logits = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    with_xtc = Params(seed=5, xtc_probability=0.25, xtc_threshold=0.15)
    happened = draws = 0
    for position in range(4000):
        output = [3] * position
        p = dataclasses.replace(with_xtc, output=output)
        happens = uniform_at(5, position, 1) < 0.25
        assert uniform_at(5, position, 1) == reference.uniform_at(5, position, 1)
        happened += happens
        if position % 40 == 0:
            plain = sample_one(logits, dataclasses.replace(p, xtc_probability=0.0))
            token = sample_one(logits, p)
            assert token in (2, 3) if happens else token == plain
            draws += 1
    assert draws == 100
    assert abs(happened - 1000) < 4.5 * np.sqrt(4000 * 0.25 * 0.75)


def test_llama_servers_order_has_temperature_last() -> None:
    """At a high temperature min_p before it keeps one token, min_p behind it all."""
    logits = torch.tensor([3.0, 0.0, -1.0])
    state = SamplerState(1, 3)
    p = Params(temperature=100.0, min_p=0.5)
    assert survivors_of(state, logits, p)[0] == [0, 1, 2]
    assert survivors_of(state, logits, dataclasses.replace(p, order=("min_p", "temperature")))[0] == [0]
    assert survivors_of(state, logits, dataclasses.replace(p, order=("min_p",)))[0] == [0]


def random_text(rng: np.random.Generator) -> list[int]:
    """A text of few distinct tokens, with repetitions."""
    text: list[int] = []
    while len(text) < rng.integers(1, 120):
        if text and rng.random() < 0.4:
            begin = int(rng.integers(0, len(text)))
            text += text[begin : begin + int(rng.integers(1, 30))]
        else:
            text += rng.integers(0, 12, rng.integers(1, 6)).tolist()
    return text


def random_dry(rng: np.random.Generator, text: list[int]) -> Params:
    split = int(rng.integers(0, len(text) + 1))
    sequences = [rng.integers(0, 12, rng.integers(1, 4)).tolist() for _ in range(rng.integers(0, 4))]
    return Params(
        dry_multiplier=float(rng.choice([0.5, 0.8, 4.0])),
        dry_base=float(rng.choice([1.0, 1.1, 1.75, 90.0])),
        dry_allowed_length=int(rng.choice([0, 1, 2, 5])),
        dry_penalty_last_n=int(rng.choice([-1, -1, 0, 3, 40])),
        dry_breakers=sequences,
        prompt=text[:split],
        output=text[split:],
        temperature=float(rng.choice([0.0, 1.0])),
        seed=int(rng.integers(1 << 62)),
    )


def test_dry_is_the_references_from_token_to_token() -> None:
    """Bound in the middle of a text and told the rest, as a request that goes on, or bound at its end."""
    rng, penalised = np.random.default_rng(3), 0
    state, slot = SamplerState(1, 16), np.zeros(1, np.int32)
    for _ in range(150):
        text = random_text(rng)
        p = random_dry(rng, text)
        bind(state, 0, p)
        for _ in range(6):
            logits = torch.from_numpy(rng.normal(0, 2, 16).astype(np.float32))
            expected = reference.sample(logits, p)
            penalised += bool(reference.dry_penalties(p))
            assert int(state.sample(logits[None], slot)[0][0]) == expected, p
            p = dataclasses.replace(p, output=[*p.output, expected])
    assert penalised > 200


def test_dry_breaks_a_loop_and_no_longer_at_its_breaker() -> None:
    logits = torch.zeros(8)
    logits[3] = 1.0
    loop = Params(temperature=0.0, prompt=[1, 2, 3, 1, 2], dry_multiplier=1.0, dry_base=2.0)
    assert sample_one(logits, dataclasses.replace(loop, dry_multiplier=0.0)) == 3
    assert sample_one(logits, loop) == 0, "1 - 1 * 2^0 is no more than the others' 0, and 0 comes first"
    assert sample_one(logits, dataclasses.replace(loop, dry_breakers=[[2]])) == 3
    assert sample_one(logits, dataclasses.replace(loop, dry_breakers=[[1, 2]])) == 3
    assert sample_one(logits, dataclasses.replace(loop, dry_breakers=[[5, 2]])) == 0


@pytest.mark.parametrize("size", [0, 1, 2, 50, 500])
def test_runs_by_lag(size: int) -> None:
    text = np.random.default_rng(size).integers(0, 2, size).astype(np.int32)
    runs = runs_by_lag(text)
    for lag in range(size):
        equal = (text[lag:] == text[: size - lag])[::-1]
        assert runs[lag] == (len(equal) if equal.all() else int(np.argmin(equal)))


def test_a_request_with_dry_draws_the_same_alone_and_in_a_crowd() -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(7))
    params = [
        Params(seed=i, dry_multiplier=2.0, dry_allowed_length=1, xtc_probability=0.5, xtc_threshold=0.05)
        for i in range(4)
    ]
    crowd, alone = SamplerState(4, 30), SamplerState(1, 30)
    for slot, p in enumerate(params):
        bind(crowd, slot, p)
    together = np.array([crowd.sample(logits, np.arange(4, dtype=np.int32))[0] for _ in range(40)])
    bind(alone, 0, params[2])
    lonely = [alone.sample(logits[2:3], np.zeros(1, np.int32))[0][0] for _ in range(40)]
    assert together[:, 2].tolist() == lonely
    assert len(set(pairwise(lonely))) > 20


def test_typical_p_of_a_large_vocabulary_takes_the_references_tokens() -> None:
    """Rows with a few likely tokens, of which most are no candidates, half of them masked in the second."""
    rng, vocab = np.random.default_rng(2), 151_936
    state = SamplerState(1, vocab)
    for share, temperature, masked in ((0.2, 1.0, 0.0), (0.9, 0.7, 0.5), (0.999, 1.5, 0.0)):
        x = rng.normal(0, 2, vocab)
        x[rng.integers(0, vocab, 40)] += rng.uniform(8, 16, 40)
        x[rng.random(vocab) < masked] = -np.inf
        logits = torch.from_numpy(x).float()
        p = Params(typical_p=share, temperature=temperature, order=("temperature", "typical_p"))
        ids, probabilities = reference.survivors(logits, p)
        assert survivors_of(state, logits, p)[0] == ids[probabilities > probabilities.max() * TINY].tolist()
