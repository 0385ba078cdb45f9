"""The rules of beam search, beside dense arithmetic over a whole vocabulary as transformers and the paper have it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.messages.beams import BeamParams, EarlyStopping
from moeserve.messages.sampling import SamplingParams, TokenLogprob
from moeserve.router.core.beams.beam_search import BeamSearch

VOCABULARY = 24
Model = Callable[[tuple[int, ...]], "np.ndarray[Any, np.dtype[np.float64]]"]
Found = list[tuple[tuple[int, ...], float]]


def model_of(seed: int) -> Model:
    """Log-probabilities by all tokens before."""

    @cache
    def logprobs(tokens: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float64]]:
        logits = np.random.default_rng([seed, *tokens]).normal(size=VOCABULARY) * 2.0
        found: np.ndarray[Any, np.dtype[np.float64]] = logits - np.log(np.exp(logits).sum())
        return found

    return logprobs


def search(model: Model, params: BeamParams, sampling: SamplingParams) -> Found:
    """With as few top tokens as are asked for."""
    it = BeamSearch(params, sampling)
    beams: list[tuple[int, ...]] = [()]
    while beams:
        tops = []
        for beam in beams:
            logprobs = model(beam)
            ids = np.argsort(-logprobs)[: it.num_candidates]
            tops.append(TokenLogprob(int(ids[0]), 0.0, 1, tuple(ids.tolist()), tuple(logprobs[ids].tolist())))
        beams = [(*beams[row], token) for row, token in it.advance(tops)]
        assert len(beams) in (0, *range(params.width // params.groups, params.width + 1))
    return [(tuple(one.token_id for one in a.beam.logprobs()), a.score) for a in it.answers()]


def dense_search(model: Model, params: BeamParams, sampling: SamplingParams) -> Found:
    """All continuations of all beams in one table a group, groups one after the other (Vijayakumar et al. 2016)."""
    size = params.width // params.groups
    ends = list(sampling.stop_token_ids)
    beams: list[Found] = [[((), 0.0)] for _ in range(params.groups)]
    answers: list[Found] = [[] for _ in range(params.groups)]
    done = [False] * params.groups
    for length in range(1, sampling.max_tokens + 1):
        taken = np.zeros(VOCABULARY)
        for g in range(params.groups):
            if done[g]:
                continue
            table = np.stack([model(tokens) + score for tokens, score in beams[g]])
            table -= params.diversity_penalty * taken
            if length <= sampling.min_tokens:
                table[:, ends] = -np.inf
            order = [divmod(int(i), VOCABULARY) for i in np.argsort(-table, axis=None, kind="stable")]
            best = [((*beams[g][b][0], token), float(table[b, token])) for b, token in order]
            is_last = length == sampling.max_tokens
            for tokens, score in best[:size]:
                if is_last or tokens[-1] in ends:
                    answers[g].append((tokens, score / length**params.length_penalty))
            answers[g] = sorted(answers[g], key=lambda answer: -answer[1])[:size]
            beams[g] = [one for one in best if one[0][-1] not in ends][:size]
            taken += np.bincount([tokens[-1] for tokens, _ in beams[g]], minlength=VOCABULARY)
            reach = length
            if params.early_stopping == "never" and params.length_penalty > 0:
                reach = sampling.max_tokens
            may_improve = (
                beams[g][0][1] / reach**params.length_penalty > answers[g][-1][1] if answers[g] else True
            )
            done[g] = is_last or (
                len(answers[g]) == size and (params.early_stopping is True or not may_improve)
            )
            if done[g]:
                taken -= np.bincount([tokens[-1] for tokens, _ in beams[g]], minlength=VOCABULARY)
    return sorted((answer for group in answers for answer in group), key=lambda answer: -answer[1])


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    size=st.integers(1, 4),
    groups=st.integers(1, 3),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    diversity_penalty=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
    max_tokens=st.integers(1, 7),
    min_tokens=st.integers(0, 3),
    ends=st.lists(st.integers(0, VOCABULARY - 1), max_size=4, unique=True),
)
def test_is_what_dense_arithmetic_finds(
    seed: int,
    size: int,
    groups: int,
    length_penalty: float,
    diversity_penalty: float,
    early_stopping: EarlyStopping,
    max_tokens: int,
    min_tokens: int,
    ends: list[int],
) -> None:
    width = size * groups
    penalty = diversity_penalty if groups > 1 else 0.0
    params = BeamParams(1, 0, 1, width, groups, length_penalty, penalty, early_stopping)
    sampling = SamplingParams(max_tokens, min_tokens, stop_token_ids=tuple(ends))
    model = model_of(seed)
    found, expected = search(model, params, sampling), dense_search(model, params, sampling)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected])


def test_a_wide_search_finds_the_most_likely_answer() -> None:
    """The most likely of all answers of three tokens, which greedy search misses here."""
    model = model_of(0)
    params, sampling = BeamParams(1, 0, 1, 16, length_penalty=0.0), SamplingParams(3)
    (best, score), *_ = search(model, params, sampling)

    def score_of(tokens: tuple[int, ...]) -> float:
        return float(sum(model(tokens[:i])[tokens[i]] for i in range(3)))

    everything = [(a, b, c) for a in range(VOCABULARY) for b in range(VOCABULARY) for c in range(VOCABULARY)]
    assert best == max(everything, key=score_of)
    assert score == pytest.approx(score_of(best))
    greedy: tuple[int, ...] = ()
    for _ in range(3):
        greedy = (*greedy, int(model(greedy).argmax()))
    assert score_of(greedy) < score


def test_groups_avoid_the_tokens_of_those_before() -> None:
    model, sampling = model_of(5), SamplingParams(1)
    alike = search(model, BeamParams(1, 0, 1, 3, 3), sampling)
    assert len({tokens for tokens, _ in alike}) == 1
    params = BeamParams(1, 0, 1, 3, 3, diversity_penalty=100.0)
    search_of_two = SamplingParams(2)
    firsts = {tokens[0] for tokens, _ in search(model, params, search_of_two)}
    assert len(firsts) == 3


def test_a_token_says_how_likely_it_was() -> None:
    """In each answer the log-probabilities add up to its score, and ranks are places in the row."""
    model = model_of(1)
    it = BeamSearch(BeamParams(1, 0, 2, 2, length_penalty=2.0), SamplingParams(1, logprobs=1))
    logprobs = model(())
    ids = np.argsort(-logprobs)[:4]
    assert not it.advance([TokenLogprob(0, 0.0, 1, tuple(ids.tolist()), tuple(logprobs[ids].tolist()))])
    first, second = (answer.text() for answer in it.answers())
    top = (ids[0],), (logprobs[ids[0]],)
    assert first == [TokenLogprob(ids[0], logprobs[ids[0]], 1, *top)]
    assert second == [TokenLogprob(ids[1], logprobs[ids[1]], 2, *top)]
