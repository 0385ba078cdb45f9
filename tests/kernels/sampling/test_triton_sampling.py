"""GPU sampling against the specification: the same tokens for the same seed and position, the same logprobs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.kernels.triton_device import DEVICE, counter, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.sampling import reference
from moeserve.kernels.sampling.columns import column
from moeserve.kernels.sampling.cpu import NONE_ALLOWED, NOT_FINITE
from moeserve.kernels.sampling.op import MAX_STOP, DeviceSamplerState, SamplingWorkspace, logprobs, sample
from moeserve.kernels.sampling.reference import Params
from tests.kernels.sampling.triton_sampling import VOCAB, logits_of, sample_rows
from tests.support.nightly import nightly_after
from tests.support.worker.sampling_cases import arguments_of

NUM_OUTPUT = column("num_output").value


FILTERS = [
    Params(),
    Params(temperature=0.0),
    Params(temperature=0.7, top_k=1),
    Params(top_k=40),
    Params(top_k=2000, temperature=1.5),
    Params(top_p=0.9),
    Params(top_p=0.3, temperature=3.0),
    Params(min_p=0.02),
    Params(top_k=50, top_p=0.8, min_p=0.01),
    Params(top_p=1e-9),
]


@pytest.mark.parametrize("p", nightly_after(5, FILTERS[::-1]), ids=repr)
def test_tokens_are_the_references(p: Params) -> None:
    rows = 3
    logits = logits_of(rows)
    params = [replace(p, seed=2**63 + 17 * i, output=(1,) * (i % 3)) for i in range(rows)]
    got, state = sample_rows(logits, params)
    assert got == [reference.sample(logits[i], params[i]) for i in range(rows)]
    assert state.params[1:, NUM_OUTPUT].tolist() == [len(q.output) + 1 for q in params]


def test_several_tokens_of_a_slot() -> None:
    """Each is what it would have been behind the others; only then it is told how many of them count."""
    params = [Params(seed=7, output=(1, 1), temperature=1.5), Params(seed=8, temperature=1.5)]
    slots, ahead = [0, 1, 0, 0, 1], [0, 0, 1, 2, 1]
    logits = logits_of(len(slots))
    state, room = DeviceSamplerState(2, VOCAB, DEVICE), SamplingWorkspace(len(slots), VOCAB, DEVICE)
    for slot, p in enumerate(params):
        state.bind(slot, **arguments_of(p))
    tokens = torch.empty(len(slots), dtype=torch.int32, device=DEVICE)
    sample(
        logits.to(DEVICE), ints(slots), counter(len(slots)), state.params, state.bias_ids, state.bias_values,
        state.stop_ids, state.history, None, None, room.block_max, room.block_sum, room.values, room.ids, tokens,
        ahead=ints(ahead),
    )  # fmt: skip
    assert tokens.tolist() == [
        reference.sample(
            logits[row], replace(params[slot], output=(1,) * (len(params[slot].output) + before))
        )
        for row, (slot, before) in enumerate(zip(slots, ahead, strict=True))
    ]
    assert state.params[:, NUM_OUTPUT].tolist() == [2, 0]
    state.note_outputs(ints([1, 0]).long(), ints([1, 3]))
    assert state.params[:, NUM_OUTPUT].tolist() == [5, 1]


@pytest.mark.parametrize(
    "p", [Params(top_k=5), Params(top_p=0.5), Params(top_k=7, top_p=0.6), Params(temperature=0.0)], ids=repr
)
def test_ties_go_to_the_lowest_ids(p: Params) -> None:
    """Four values in all, and both zeros."""
    logits = torch.randint(0, 4, (2, VOCAB), generator=torch.Generator().manual_seed(1)).float()
    logits[1] *= -1
    params = [replace(p, seed=i) for i in range(2)]
    assert sample_rows(logits, params)[0] == [reference.sample(logits[i], params[i]) for i in range(2)]


EDITS = [
    Params(bias_ids=(3, 1030, 2499), bias_values=(4.0, 9.0, -2.0)),
    Params(repetition_penalty=1.3, prompt=(1, 2, 2000), output=(5, 5, 2400)),
    Params(presence_penalty=1.5, frequency_penalty=0.5, output=(7, 7, 7, 1500), prompt=(9,)),
    Params(min_tokens=3, stop_ids=(0, 1024, 2047), output=(4,)),
    Params(min_tokens=1, stop_ids=(0,), output=(4,)),
    Params(
        bias_ids=(3, 7),
        bias_values=(9.0, 9.0),
        repetition_penalty=0.8,
        prompt=(3,),
        output=(7,),
        temperature=0.0,
    ),
]


@pytest.mark.parametrize("p", EDITS, ids=lambda p: repr(p)[:60])
def test_edits(p: Params) -> None:
    logits = logits_of(2, scale=1.0)
    for spot in (*p.bias_ids, *p.stop_ids, *p.output, *p.prompt):
        logits[:, spot] += 6.0  # where it matters
    params = [replace(p, seed=5), replace(p, seed=6, top_k=20)]
    assert sample_rows(logits, params)[0] == [reference.sample(logits[i], params[i]) for i in range(2)]


def test_history_follows_the_output() -> None:
    p = Params(temperature=0.0, frequency_penalty=1.0, output=(8,))
    logits = torch.zeros(1, VOCAB)
    logits[0, 8], logits[0, 2000] = 4.0, 3.5
    (token,), state = sample_rows(logits, [p])
    assert token == 2000
    assert state.history[1, [8, 2000]].tolist() == [2, 2]


def test_bitmask() -> None:
    allowed = torch.rand(2, 79 * 32, generator=torch.Generator().manual_seed(2)) < 0.02
    words = (allowed.view(2, 79, 32).long() << torch.arange(32)).sum(2)
    bitmask = torch.where(words >= 2**31, words - 2**32, words).int()
    logits = logits_of(2)
    masked = logits.masked_fill(~allowed[:, :VOCAB], -torch.inf)
    params = [Params(seed=1), Params(temperature=0.0)]
    assert sample_rows(logits, params, bitmask=bitmask)[0] == [
        reference.sample(masked[i], params[i]) for i in range(2)
    ]


def test_rows_that_cannot_be_sampled() -> None:
    logits = logits_of(5)
    logits[0, 2000], logits[1, 3], logits[2], logits[3, 5:] = torch.nan, torch.inf, -torch.inf, -torch.inf
    params = [Params(seed=4), Params(temperature=0.0), Params(top_k=3), Params(top_p=0.9), Params()]
    got, state = sample_rows(logits, params)
    assert got == [-1, -1, -1, reference.sample(logits[3], params[3]), reference.sample(logits[4], params[4])]
    assert state.params[1:4, NUM_OUTPUT].tolist() == [0, 0, 0]


def test_masks_that_leave_nothing_are_told_from_logits_that_are_not_finite() -> None:
    logits = logits_of(4)
    logits[1, 2000], logits[2] = torch.nan, -torch.inf
    params = [Params(seed=1), Params(seed=2, temperature=0.0), Params(top_k=3), Params(seed=3)]
    params[0] = replace(params[0], frequency_penalty=1.0)
    bitmask = torch.zeros(4, 79, dtype=torch.int32)
    bitmask[3] = -1
    got, state = sample_rows(logits, params, bitmask=bitmask)
    assert got == [NONE_ALLOWED, NOT_FINITE, NOT_FINITE, reference.sample(logits[3], params[3])]
    assert state.params[1:, NUM_OUTPUT].tolist() == [0, 0, 0, 1]
    assert (state.history == 0).all()


@pytest.mark.parametrize("temperature", [1e-45, 1e-39, 1e-30])
def test_a_temperature_beside_zero_takes_the_largest(temperature: float) -> None:
    """1 / temperature is no float: the token is one of the vocabulary all the same."""
    logits = logits_of(3)
    edits = Params(temperature=temperature, frequency_penalty=0.1)
    params = [Params(temperature=temperature), Params(temperature=temperature, top_p=0.9), edits]
    assert sample_rows(logits, params)[0] == logits.argmax(-1).tolist()


def test_logprobs_of_what_is_no_token() -> None:
    logits, room = logits_of(3), SamplingWorkspace(3, VOCAB, DEVICE)
    ranks = torch.full((3,), 7, dtype=torch.int32, device=DEVICE)
    top = torch.empty(3, 2, dtype=torch.int32, device=DEVICE), torch.empty(3, 2, device=DEVICE)
    logprobs(
        logits.to(DEVICE), ints([NONE_ALLOWED, VOCAB, 5]), counter(3), room.block_max, room.block_sum, room.values,
        room.ids, torch.empty(3, device=DEVICE), ranks, *top,
    )  # fmt: skip
    assert ranks.tolist() == [0, 0, reference.logprobs(logits[2], 5, 0)[1]]


def test_rows_beyond_the_count_are_left() -> None:
    got, state = sample_rows(logits_of(3), [Params(), Params(), Params()], live=2)
    assert got[0] == -7  # rows are in falling order of slots
    assert state.params[1:, NUM_OUTPUT].tolist() == [0, 1, 1]


@pytest.mark.parametrize("top_n", [0, 3, 20])
def test_logprobs(top_n: int) -> None:
    logits = logits_of(4)
    logits[1] = logits[1].round()  # ties
    logits[2, 3:] = -torch.inf
    logits[3, 9] = torch.nan
    targets = [0, 1700, 1, 5]
    room = SamplingWorkspace(4, VOCAB, DEVICE)
    lp, ranks = torch.zeros(4, device=DEVICE), torch.full((4,), -7, dtype=torch.int32, device=DEVICE)
    ids = torch.full((4, top_n), -7, dtype=torch.int32, device=DEVICE)
    values = torch.zeros(4, top_n, device=DEVICE)
    logprobs(
        logits.to(DEVICE), ints(targets), counter(4), room.block_max, room.block_sum, room.values, room.ids, lp, ranks,
        ids, values,
    )  # fmt: skip
    for i in range(3):
        expected, rank, top, top_values = reference.logprobs(logits[i], targets[i], top_n)
        assert (ranks[i].item(), ids[i, : len(top)].tolist()) == (rank, top)
        assert lp[i].item() == pytest.approx(expected, abs=2e-6)
        assert values[i, : len(top)].tolist() == pytest.approx(top_values, abs=2e-6)
        assert (ids[i, len(top) :] == -1).all()
    assert ranks[3] == 0


def test_bind_refuses_what_is_out_of_range() -> None:
    state = DeviceSamplerState(1, VOCAB, DEVICE)
    with pytest.raises(ValueError, match="token id"):
        state.bind(0, prompt=np.array([VOCAB], np.int32))
    with pytest.raises(ValueError, match="more than"):
        state.bind(0, stop_ids=np.arange(MAX_STOP + 1, dtype=np.int32))
