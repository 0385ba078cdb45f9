"""The worker's sampling state: what a request sees from step to step."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from moeserve.kernels.sampling.cpu import NONE_ALLOWED, NOT_FINITE
from moeserve.messages.sampling import SamplingParams, TokenLogprob
from moeserve.messages.steps import Sampled
from moeserve.worker.drafts.foretold import guess
from moeserve.worker.engines.cpu.sampler import CpuSampler, Draw
from moeserve.worker.sequences import Sequences, entries

VOCAB = 400
NONE = np.zeros(0, np.int32)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def logits_of_step(step: int) -> torch.Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(step))


def run(state: CpuSampler, slot: int, steps: range) -> list[int]:
    return [int(state.sample(logits_of_step(step), ids(slot))[0][0]) for step in steps]


def test_a_seed_reproduces_and_another_differs() -> None:
    state = CpuSampler(4, VOCAB)
    runs = []
    for slot, seed in enumerate((1, 1, 2, -1)):
        state.bind(slot, SamplingParams(max_tokens=50, seed=seed), ids(1, 2), NONE)
        runs.append(run(state, slot, range(50)))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2] != runs[3]


@pytest.mark.parametrize(
    "settings", [{}, {"top_k": 9}, {"top_p": 0.7, "temperature": 1.5}, {"min_p": 0.05}, {"typical_p": 0.6}]
)
def test_what_will_be_drawn_is_foretold(settings: dict[str, float]) -> None:
    """By the same noise, without a trace in what is drawn."""
    state = CpuSampler(2, VOCAB)
    for slot in range(2):
        state.bind(slot, SamplingParams(max_tokens=60, seed=3, **settings), ids(1, 2, 3), ids(4))  # type: ignore[arg-type]
    told = []
    for step in range(60):
        draw = state.foretell(logits_of_step(step)[0], 1, 4 + step)
        assert draw is not None
        told.append(guess(draw, spread=1e-9)[0])
    assert told == run(state, 0, range(60)) == run(state, 1, range(60))


def test_a_guess_is_as_sure_as_the_point_is_far_from_the_ends() -> None:
    """Three tokens have probabilities 0.5, 0.1 and 0.4."""
    weights = np.array([5.0, 1.0, 4.0], np.float32)
    sure, unsure, near = (guess(Draw(ids(7, 8, 9), weights, point)) for point in (0.1, 0.49, 0.55))
    assert (sure[0], unsure[0]) == (7, 7)
    assert sure[1] > 0.9
    assert 0.4 < unsure[1] < 0.6
    assert near[0] != 8, "the point is in it, but it is too narrow to be hit"
    token, share = guess(Draw(ids(7, 8, 9), weights, 0.1), spread=1e3)
    assert token == 7
    assert share == pytest.approx(0.5, abs=1e-3)


def test_nothing_is_foretold_of_a_greedy_request() -> None:
    state = CpuSampler(1, VOCAB)
    state.bind(0, SamplingParams(max_tokens=4, seed=3), ids(1, 2), NONE)
    assert state.foretell(torch.full([VOCAB], math.nan), 0, 2) is None
    state.bind(0, SamplingParams(max_tokens=4, temperature=0.0), ids(1, 2), NONE)
    assert state.foretell(logits_of_step(0)[0], 0, 2) is None


def test_a_paused_request_goes_on_as_if_it_had_not_stopped() -> None:
    params = SamplingParams(
        max_tokens=40,
        seed=9,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        top_p=0.9,
    )
    prompt = ids(5, 6, 7)
    state = CpuSampler(2, VOCAB)
    state.bind(0, params, prompt, NONE)
    whole = run(state, 0, range(40))
    state.bind(1, params, prompt, NONE)
    first = run(state, 1, range(15))
    state.bind(0, SamplingParams(max_tokens=1), ids(0), NONE)  # its slot goes to another meanwhile
    state.bind(0, params, prompt, np.array(first, np.int32))
    assert first + run(state, 0, range(15, 40)) == whole


def test_penalties_count_what_was_sampled() -> None:
    """With equal logits and a presence penalty, greedy output walks through the vocabulary."""
    state = CpuSampler(1, VOCAB)
    state.bind(0, SamplingParams(max_tokens=9, temperature=0, presence_penalty=1.0), ids(0, 1), NONE)
    flat = torch.zeros(1, VOCAB)
    assert [int(state.sample(flat, ids(0))[0][0]) for _ in range(5)] == [0, 1, 2, 3, 4]
    state.bind(0, SamplingParams(max_tokens=9, temperature=0, repetition_penalty=2.0), ids(0, 1), NONE)
    assert [int(state.sample(flat + 1, ids(0))[0][0]) for _ in range(3)] == [2, 3, 4]  # the prompt counts too
    state.bind(0, SamplingParams(max_tokens=9, temperature=0), ids(0, 1), NONE)  # nothing stays behind
    assert [int(state.sample(flat, ids(0))[0][0]) for _ in range(3)] == [0, 0, 0]


def test_stop_tokens_wait_for_min_tokens() -> None:
    state = CpuSampler(1, VOCAB)
    params = SamplingParams(max_tokens=9, temperature=0, min_tokens=3, stop_token_ids=(7, 8))
    state.bind(0, params, ids(1), NONE)
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8], logits[0, 9] = 5.0, 4.0, 3.0
    assert [int(state.sample(logits, ids(0))[0][0]) for _ in range(4)] == [9, 9, 9, 7]


def test_logit_bias_forces_and_forbids() -> None:
    state = CpuSampler(2, VOCAB)
    state.bind(0, SamplingParams(max_tokens=9, seed=1, logit_bias={33: 100.0}), ids(1), NONE)
    assert set(run(state, 0, range(20))) == {33}
    state.bind(1, SamplingParams(max_tokens=9, temperature=0, logit_bias={0: -100.0}), ids(1), NONE)
    assert int(state.sample(torch.zeros(1, VOCAB), ids(1))[0][0]) == 1


def test_rows_of_a_batch_go_to_their_slots() -> None:
    state = CpuSampler(3, VOCAB)
    for slot, logprobs in enumerate((None, 2, 0)):
        state.bind(slot, SamplingParams(max_tokens=9, temperature=0, logprobs=logprobs), ids(1), NONE)
    logits = torch.zeros(3, VOCAB)
    logits[0, 10], logits[1, 20], logits[2, 30] = 9.0, 9.0, 9.0
    logits[0, 11] = 8.0
    tokens, found = state.sample(logits, ids(1, 0, 2))
    assert tokens.tolist() == [10, 20, 30]
    first = found[0]
    assert isinstance(first, TokenLogprob)
    assert (first.token_id, first.rank, first.top_ids) == (10, 1, (10, 11))
    log_sum = math.log(math.exp(9) + math.exp(8) + VOCAB - 2)
    assert first.logprob == pytest.approx(9 - log_sum, abs=1e-6)
    assert first.top_logprobs == pytest.approx([9 - log_sum, 8 - log_sum], abs=1e-6)
    assert found[1] is None
    third = found[2]
    assert third is not None
    assert third.top_ids == ()


def test_a_broken_row_fails_its_own_request_alone() -> None:
    state = CpuSampler(2, VOCAB)
    for slot in range(2):
        state.bind(slot, SamplingParams(max_tokens=9, temperature=0, logprobs=1), ids(1), NONE)
    logits = torch.zeros(2, VOCAB)
    logits[0, 3] = math.nan
    tokens, logprobs = state.sample(logits, ids(0, 1))
    assert tokens.tolist() == [-1, 0]
    assert logprobs[0] is None
    assert logprobs[1] is not None


def test_a_failed_rows_token_is_stored_as_one_that_has_an_embedding() -> None:
    """The plan in flight computes the next row of its request, whose token this is."""
    state = CpuSampler(3, VOCAB)
    for slot in range(3):
        state.bind(slot, SamplingParams(max_tokens=9, temperature=0), ids(1), NONE)
    logits = torch.zeros(3, VOCAB)
    logits[0, 3], logits[2, 9] = math.nan, 5.0
    nothing = np.zeros((1, VOCAB // 32 + 1), np.int32)
    tokens, logprobs = state.sample(logits, ids(0, 1, 2), (nothing, ids(-1, 0, -1)))
    assert tokens.tolist() == [NOT_FINITE, NONE_ALLOWED, 9]
    sequences = Sequences(3, 4)
    sequences.tokens[:] = 77
    sequences.append(ids(0, 1, 2), ids(1, 2, 3), tokens)
    assert sequences.tokens.tolist() == [[77, 0, 77, 77], [77, 77, 0, 77], [77, 77, 77, 9]]
    not_finite, none_allowed, fine = entries(tokens, logprobs, {}, ())
    assert (not_finite.token_id, not_finite.error) == (-1, None)
    assert none_allowed.token_id == -1
    assert none_allowed.error is not None
    assert none_allowed.error.startswith("no token is allowed: ")
    assert fine.token_id == 9
    assert entries(tokens, logprobs, {1: "its grammar"}, ())[1].error == "its grammar"
    assert entries(tokens, logprobs, {}, (1,))[1] == Sampled(-1, late=True)


def test_prompt_logprobs_are_those_of_the_tokens_given() -> None:
    state = CpuSampler(1, VOCAB)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[2, 0] = math.inf
    found = state.prompt_logprobs(logits, ids(17, 399, 4), 3)
    expected = torch.log_softmax(logits.double(), -1)
    assert [f.token_id for f in found] == [17, 399, 4]
    for row in range(2):
        assert found[row].logprob == pytest.approx(float(expected[row, found[row].token_id]), abs=1e-6)
        assert [*found[row].top_ids] == logits[row].topk(3).indices.tolist()
    assert (found[2].rank, found[2].top_ids) == (0, ())
    assert math.isnan(found[2].logprob)


def test_ids_that_the_model_does_not_have_are_refused() -> None:
    state = CpuSampler(1, VOCAB)
    with pytest.raises(ValueError, match="token id 400"):
        state.bind(0, SamplingParams(max_tokens=1, logit_bias={VOCAB: 1.0}), ids(1), NONE)
