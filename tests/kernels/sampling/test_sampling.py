"""The C++ sampler against the reference: the same survivors, the same draws, the same logprobs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.sampling import reference
from moeserve.kernels.sampling.cpu import NONE_ALLOWED, NOT_FINITE, SamplerState, uniform_at
from moeserve.kernels.sampling.reference import Params
from tests.support.worker.sampling_cases import (
    TINY,
    bind,
    mask_of_ids,
    random_logits,
    sample_one,
    survivors_of,
)

QWEN_VOCAB = 151_936
INF = float("inf")


def random_filters(rng: np.random.Generator, vocab: int) -> dict[str, Any]:
    return {
        "temperature": float(rng.choice([1e-6, 0.01, 0.3, 0.7, 1.0, 1.0, 2.0, 100.0])),
        "top_k": int(rng.choice([0, 0, 1, 2, 20, vocab // 2, vocab - 1, vocab, vocab + 7])),
        "top_p": float(rng.choice([1.0, 1.0, 1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 0.99999])),
        "min_p": float(rng.choice([0.0, 0.0, 1e-9, 0.02, 0.1, 0.5, 1.0])),
    }


def test_the_filters_let_exactly_the_references_tokens_through() -> None:
    rng = np.random.default_rng(0)
    for vocab in (1, 2, 15, 16, 17, 127, 128, 129, 1000, 2500):
        state = SamplerState(1, vocab)
        for _ in range(120):
            logits, p = random_logits(rng, vocab), Params(**random_filters(rng, vocab))
            ids, probabilities = reference.survivors(logits, p)
            possible = probabilities > probabilities.max() * TINY
            got, weights = survivors_of(state, logits, p)
            assert got == ids[possible].tolist(), p
            np.testing.assert_allclose(weights, probabilities[possible], rtol=5e-7)


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_p": 0.95},
        {"top_k": 20, "top_p": 0.95, "min_p": 0.02},
        {"top_k": 5000, "top_p": 0.9},
        {"top_k": 1},
        {"min_p": 0.001, "top_p": 0.999, "temperature": 1.5},
    ],
)
@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0])
def test_filters_on_a_whole_vocabulary(filters: dict[str, float], spread: float) -> None:
    logits = torch.randn(QWEN_VOCAB, generator=torch.Generator().manual_seed(1)) * spread
    p = Params(**filters)
    ids, probabilities = reference.survivors(logits, p)
    got, weights = survivors_of(SamplerState(1, QWEN_VOCAB), logits, p)
    assert got == ids.tolist()
    np.testing.assert_allclose(weights, probabilities, rtol=5e-7)


def test_of_equal_logits_at_a_threshold_the_lowest_ids_stay() -> None:
    state = SamplerState(1, 300)
    logits = torch.zeros(300)
    logits[250] = 1.0
    assert survivors_of(state, logits, Params(top_k=4))[0] == [0, 1, 2, 250]
    assert survivors_of(state, torch.zeros(300), Params(top_p=0.01))[0] == [0, 1, 2]
    minus_zero = torch.tensor([-0.0, 0.0, -0.0] + [-1.0] * 297)
    assert survivors_of(state, minus_zero, Params(top_k=2))[0] == [0, 1]


def random_edits(rng: np.random.Generator, vocab: int) -> dict[str, Any]:
    biased = rng.choice(vocab, min(3, vocab), replace=False)
    return {
        "presence_penalty": float(rng.choice([0.0, 0.5, -2.0])),
        "frequency_penalty": float(rng.choice([0.0, 0.25, -1.0])),
        "repetition_penalty": float(rng.choice([1.0, 1.25, 0.5])),
        "bias_ids": biased.tolist(),
        "bias_values": rng.choice([-100.0, -1.0, 2.0, 5.0], len(biased)).tolist(),
        "stop_ids": rng.choice(vocab, min(2, vocab - 1), replace=False).tolist(),
        "min_tokens": int(rng.choice([0, 5, 30])),
        "prompt": rng.integers(0, vocab, rng.integers(0, 40)).tolist(),
        "output": rng.integers(0, vocab, rng.integers(0, 20)).tolist(),
    }


def test_draws_with_everything_set_are_the_references() -> None:
    rng = np.random.default_rng(2)
    seen = set()
    for _ in range(1000):
        vocab = int(rng.choice([3, 40, 333]))
        p = Params(**random_filters(rng, vocab), **random_edits(rng, vocab), seed=int(rng.integers(1 << 62)))
        if rng.random() < 0.2:
            p = dataclasses.replace(p, temperature=0.0)
        if rng.random() < 0.3:
            some = rng.choice(vocab, rng.integers(0, vocab + 1), replace=False)
            p = dataclasses.replace(p, allowed=some.tolist())
        logits = random_logits(rng, vocab)
        expected = reference.sample(logits, p)
        assert sample_one(logits, p) == expected, p
        seen.add(expected)
    assert len(seen) > 100


@pytest.mark.parametrize("filters", [{}, {"top_k": 7, "top_p": 0.9}, {"min_p": 0.1}])
def test_draws_follow_the_distribution(filters: dict[str, float]) -> None:
    """Chi-square of 20,000 draws, against its 99.99% quantile."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3))
    p = Params(seed=11, temperature=0.8, **filters)
    ids, probabilities = reference.survivors(logits, p)
    state, slot, draws = SamplerState(1, 12), np.zeros(1, np.int32), 20_000
    bind(state, 0, p)
    counts = np.bincount([state.sample(logits[None], slot)[0][0] for _ in range(draws)], minlength=12)
    expected = probabilities.numpy() * draws
    assert counts.sum() == counts[ids].sum() == draws
    statistic = ((counts[ids] - expected) ** 2 / expected).sum()
    freedom = len(ids) - 1
    quantile = freedom * (1 - 2 / (9 * freedom) + 3.719 * np.sqrt(2 / (9 * freedom))) ** 3  # Wilson-Hilferty
    assert statistic < quantile


def test_the_random_number_is_philox_of_seed_and_position() -> None:
    for seed, position in [(0, 0), (0, 1), (1, 0), (2**64 - 1, 2**40), (12345, 678)]:
        assert uniform_at(seed, position) == reference.uniform_at(seed, position)


def test_the_last_block_and_a_draw_at_the_very_end() -> None:
    """Nothing but tokens far behind in the row can come, wherever the random number falls."""
    logits = torch.full((5000,), -1e9)
    logits[[10, 4999]] = 0.0
    state, slot = SamplerState(1, 5000), np.zeros(1, np.int32)
    bind(state, 0, Params(seed=5))
    drawn = [int(state.sample(logits[None], slot)[0][0]) for _ in range(500)]
    assert set(drawn) == {10, 4999}


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.randn(QWEN_VOCAB, generator=torch.Generator().manual_seed(4))
    logits[[70_001, 70_002, 151_935]] = 9.0
    assert sample_one(logits, Params(temperature=0.0)) == 70_001
    assert sample_one(torch.tensor([-1.0, -0.0, 0.0]), Params(temperature=0.0)) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [5, 200, 1024])
def test_a_row_that_is_not_finite_gives_no_token(vocab: int, temperature: float) -> None:
    p = Params(temperature=temperature, top_k=3)
    for bad in (float("nan"), -float("nan"), INF):
        for at in (0, vocab - 1):
            logits = torch.zeros(vocab)
            logits[at] = bad
            assert sample_one(logits, p) == -1
            hidden = dataclasses.replace(p, stop_ids=[at], min_tokens=1)  # not even behind a mask
            assert sample_one(logits, hidden) == -1
            assert sample_one(logits, dataclasses.replace(p, allowed=[vocab // 2])) == -1
    assert sample_one(torch.full((vocab,), -INF), p) == -1
    masked = torch.full((vocab,), -INF)
    masked[vocab // 2] = -3e38
    assert sample_one(masked, p) == vocab // 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [5, 200, 1024])
def test_masks_that_leave_nothing_are_told_from_logits_that_are_not_finite(
    vocab: int, temperature: float
) -> None:
    p = Params(temperature=temperature, min_tokens=1)
    nothing = [
        dataclasses.replace(p, allowed=[]),
        dataclasses.replace(p, allowed=[3], stop_ids=[3]),
        dataclasses.replace(p, stop_ids=[*range(vocab)]),
        dataclasses.replace(p, stop_ids=[*range(vocab)], allowed=[1]),
    ]
    for masked in nothing:
        assert sample_one(torch.zeros(vocab), masked) == NONE_ALLOWED
        assert sample_one(torch.zeros(vocab), masked, logprobs=2) == NONE_ALLOWED
        for bad in (float("nan"), INF):
            assert sample_one(torch.full((vocab,), bad), masked) == NOT_FINITE
        assert sample_one(torch.full((vocab,), -INF), masked) == NOT_FINITE
    only = torch.full((vocab,), -INF)
    only[3] = 1.0
    assert sample_one(only, dataclasses.replace(p, stop_ids=[3])) == NONE_ALLOWED


def test_a_row_without_a_token_is_not_noted_as_output() -> None:
    state, slot = SamplerState(1, 40), np.zeros(1, np.int32)
    bind(state, 0, Params(temperature=0.0, frequency_penalty=1.0))
    none = np.zeros((1, 2), np.int32)
    tokens, (logprobs,) = state.sample(torch.zeros(1, 40), slot, none, slot)
    assert tokens.tolist() == [NONE_ALLOWED]
    assert logprobs is None
    assert [int(state.sample(torch.zeros(1, 40), slot)[0][0]) for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("vocab", [1, 19, 500, QWEN_VOCAB])
@pytest.mark.parametrize("top_n", [0, 1, 20])
def test_logprobs_are_of_the_raw_logits(vocab: int, top_n: int) -> None:
    rng = np.random.default_rng(5)
    p = Params(temperature=0.5, top_k=3, bias_ids=[0], bias_values=[4.0], seed=1)
    state = SamplerState(1, vocab)
    for scale in (0.0, 0.1, 3.0, 1e4):
        logits = torch.from_numpy((rng.normal(0, 1, vocab) * scale).astype(np.float32))
        bind(state, 0, p, logprobs=top_n)
        _, (sampled,) = state.sample(logits[None], np.zeros(1, np.int32))
        target = int(rng.integers(vocab))
        (given,) = state.logprobs(logits[None], np.array([target], np.int32), top_n)
        assert sampled is not None
        assert given is not None
        assert given[0] == target
        for token, logprob, rank, top_ids, top_logprobs in (sampled, given):
            expected = reference.logprobs(logits, token, top_n)
            assert (rank, top_ids) == expected[1:3]
            np.testing.assert_allclose(
                [logprob, *top_logprobs], [expected[0], *expected[3]], rtol=0, atol=1e-6
            )


def test_masks_hold_for_the_rows_they_are_for_and_leave_logprobs_alone() -> None:
    """On a vocabulary that ends within a word of the mask, with words that are full, empty and mixed."""
    vocab, slots = 1000, np.arange(3, dtype=np.int32)
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(9))
    state = SamplerState(3, vocab)
    for slot in range(3):
        bind(state, slot, Params(temperature=0.0), logprobs=2)
    masks = np.stack([mask_of_ids([*range(32, 64), 70, 999], vocab), mask_of_ids([999], vocab)])
    tokens, found = state.sample(logits, slots, masks, np.array([1, -1, 0], np.int32))
    best = logits.argmax(-1).tolist()
    allowed = torch.full((vocab,), -INF)
    allowed[[*range(32, 64), 70, 999]] = 0
    assert tokens.tolist() == [999, best[1], int((logits[2] + allowed).argmax())]
    for row, entry in enumerate(found):
        assert entry is not None
        raw = reference.logprobs(logits[row], int(tokens[row]), 2)
        assert entry[1] == pytest.approx(raw[0])
        assert entry[2:4] == raw[1:3]
    narrow = mask_of_ids([5], vocab)[None, :1]  # tokens behind its end may not come
    assert state.sample(logits, slots, narrow, np.zeros(3, np.int32))[0].tolist() == [5, 5, 5]


def test_no_logprobs_for_who_did_not_ask_nor_for_broken_rows() -> None:
    state = SamplerState(3, 50)
    bind(state, 0, Params())
    bind(state, 1, Params(), logprobs=0)
    bind(state, 2, Params(), logprobs=2)
    logits = torch.zeros(3, 50)
    logits[2, 7] = float("nan")
    tokens, found = state.sample(logits, np.arange(3, dtype=np.int32))
    assert tokens[2] == -1
    assert [f is not None for f in found] == [False, True, False]
    assert state.logprobs(logits[1:], np.array([3, 3], np.int32), 1)[1] is None


def every_isa() -> list[str]:
    usable = []
    for isa in ("plain", "avx2", "avx512_vnni"):
        try:
            SamplerState(1, 1, isa=isa)
        except ValueError:
            continue
        usable.append(isa)
    return usable


def test_the_instruction_set_and_the_pool_do_not_change_a_bit() -> None:
    rng = np.random.default_rng(6)
    vocab, rows = 1500, 24
    logits = torch.stack([random_logits(rng, vocab) for _ in range(rows)])
    params = [Params(**random_filters(rng, vocab), seed=i) for i in range(rows)]
    slots = np.arange(rows, dtype=np.int32)
    pool = CpuStream(2).pool
    states = [SamplerState(rows, vocab, isa=isa) for isa in every_isa()] + [SamplerState(rows, vocab, pool)]
    results = []
    for state in states:
        for slot, p in enumerate(params):
            bind(state, slot, p, logprobs=5)
        steps = [(t.tolist(), found) for t, found in (state.sample(logits, slots) for _ in range(20))]
        weights = [state.survivors(logits[s : s + 1], s)[1].tobytes() for s in slots]
        results.append((steps, weights))
    assert "plain" in every_isa()
    assert all(result == results[0] for result in results[1:])


def test_a_request_draws_the_same_alone_and_in_a_crowd() -> None:
    logits = torch.randn(8, 700, generator=torch.Generator().manual_seed(7))
    crowd, alone = SamplerState(8, 700), SamplerState(1, 700)
    for slot in range(8):
        bind(crowd, slot, Params(seed=slot, top_p=0.9))
    together = np.array([crowd.sample(logits, np.arange(8, dtype=np.int32))[0] for _ in range(10)])
    bind(alone, 0, Params(seed=5, top_p=0.9))
    assert together[:, 5].tolist() == [
        alone.sample(logits[5:6], np.zeros(1, np.int32))[0][0] for _ in range(10)
    ]


def test_what_does_not_fit_is_refused() -> None:
    state = SamplerState(2, 10)
    slot = np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="request slot 2"):
        bind(state, 2, Params())
    for lists in (
        {"prompt": [10]},
        {"output": [-1]},
        {"stop_ids": [10]},
        {"bias_ids": [10], "bias_values": [1.0]},
    ):
        with pytest.raises(ValueError, match="token id"):
            bind(state, 0, Params(**lists))
    for p in (
        Params(temperature=-1.0),
        Params(temperature=INF),
        Params(min_p=1.1),
        Params(repetition_penalty=0.0),
    ):
        with pytest.raises(ValueError, match="out of range"):
            bind(state, 0, p)
    with pytest.raises(ValueError, match="at most 20"):
        bind(state, 0, Params(), logprobs=21)
    with pytest.raises(ValueError, match=r"\[1, 10\]"):
        state.sample(torch.zeros(1, 11), slot)
    with pytest.raises(ValueError, match=r"\[1, 10\]"):
        state.sample(torch.zeros(2, 10), slot)
    with pytest.raises(TypeError):
        state.sample(torch.zeros(1, 10, dtype=torch.bfloat16), slot)
    with pytest.raises(ValueError, match="request slot"):
        state.sample(torch.zeros(1, 10), np.array([-1], np.int32))
    with pytest.raises(ValueError, match="token id"):
        state.logprobs(torch.zeros(1, 10), np.array([10], np.int32), 0)
    mask = np.zeros((2, 1), np.int32)
    for index in ([2], [0, 0]):
        with pytest.raises(ValueError, match="mask_of"):
            state.sample(torch.zeros(1, 10), slot, mask, np.array(index, np.int32))
    with pytest.raises(ValueError, match="go together"):
        state.sample(torch.zeros(1, 10), slot, mask)
    with pytest.raises(ValueError, match="instruction set"):
        SamplerState(1, 10, isa="mmx")
