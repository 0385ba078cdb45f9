"""XTC, DRY, top-n-sigma, typical-p and orders of samplers on the GPU: the tokens are the specification's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.kernels.sampling.triton_sampling import VOCAB, logits_of, sample_rows  # isort: skip  (it sets up the interpreter)
from moeserve.kernels.sampling import reference
from moeserve.kernels.sampling.op import DeviceSamplerState, SamplingWorkspace, sample
from moeserve.kernels.sampling.reference import Params
from tests.kernels.triton_device import DEVICE, counter, ints
from tests.support.nightly import nightly_after
from tests.support.worker.sampling_cases import arguments_of

LAST = ("top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature")
SETTINGS = [
    Params(top_n_sigma=1.0),
    Params(top_n_sigma=2.5, top_p=0.7, temperature=1.3),
    Params(typical_p=0.3),
    Params(typical_p=0.95, temperature=0.6),
    Params(xtc_probability=1.0, xtc_threshold=0.02),
    Params(xtc_probability=0.5, xtc_threshold=0.05, top_k=40),
    Params(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, order=LAST),
    Params(temperature=3.0, typical_p=0.8, xtc_probability=1.0, xtc_threshold=0.01, order=LAST),
    Params(temperature=0.0, xtc_probability=1.0, xtc_threshold=0.01, order=LAST),
    Params(temperature=2.0, top_p=0.5, order=("top_p", "temperature")),
    Params(temperature=2.0, top_k=3000, top_p=0.5, order=("top_k", "top_p")),
    Params(min_p=0.1, top_k=5, order=("min_p", "top_k")),
]


@pytest.mark.parametrize("p", nightly_after(2, SETTINGS[::-1]), ids=lambda p: repr(p)[:90])
def test_tokens_are_the_references(p: Params) -> None:
    rows = 4
    logits = logits_of(rows)
    logits[3] = logits[3].round()  # ties
    params = [replace(p, seed=2**63 + 17 * i, output=(1,) * i) for i in range(rows)]
    got, _ = sample_rows(logits, params)
    assert got == [reference.sample(logits[i], params[i]) for i in range(rows)]


def test_rows_with_and_without_an_order_share_a_batch() -> None:
    logits = logits_of(5)
    params = [
        Params(seed=1),
        Params(seed=2, xtc_probability=1.0, xtc_threshold=0.01),
        Params(temperature=0.0),
        Params(seed=3, typical_p=0.5, frequency_penalty=0.5, output=(7, 7, 9)),
        Params(seed=4, top_p=0.5),
    ]
    got, _ = sample_rows(logits, params)
    assert got == [reference.sample(logits[i], params[i]) for i in range(5)]


@pytest.mark.slow
def test_dry_follows_the_output() -> None:
    """Eight tokens one after another, of texts with repetitions, single and longer breakers."""
    rng = np.random.default_rng(3)
    params = [
        Params(seed=1, prompt=(1, 2, 3, 4, 1, 2, 3), dry_multiplier=4.0, dry_allowed_length=1),
        Params(
            temperature=0.0,
            prompt=(5,) * 20,
            output=(5,) * 3,
            dry_multiplier=0.5,
            dry_breakers=((7,), (3, 4)),
        ),
        Params(seed=2, output=(1, 2, 1, 2, 1), dry_multiplier=1.0, dry_base=1.1, dry_allowed_length=0),
        Params(
            seed=3,
            prompt=tuple(rng.integers(0, 4, 2000).tolist()),
            dry_multiplier=2.0,
            dry_penalty_last_n=1500,
        ),
        Params(seed=4),
    ]
    state, room = DeviceSamplerState(5, VOCAB, DEVICE), SamplingWorkspace(5, VOCAB, DEVICE)
    params = [replace(p, bias_ids=(2,), bias_values=(0.5,)) for p in params]
    for slot, p in enumerate(params):
        state.bind(slot, **arguments_of(p), max_tokens=40)
    assert state.chains == {0, 1, 2, 3}
    for _ in range(8):
        logits = torch.full((5, VOCAB), -9.0)
        logits[:, :8] = torch.from_numpy(rng.normal(0, 2, (5, 8)).astype(np.float32))
        tokens = torch.empty(5, dtype=torch.int32, device=DEVICE)
        sample(
            logits.to(DEVICE), ints(list(range(5))), counter(5), state.params, state.bias_ids, state.bias_values,
            state.stop_ids, state.history, None, room.edited, room.block_max, room.block_sum, room.values, room.ids,
            tokens, has_chains=True,
        )  # fmt: skip
        expected = [reference.sample(logits[i], p) for i, p in enumerate(params)]
        assert tokens.tolist() == expected
        params = [replace(p, output=(*p.output, token)) for p, token in zip(params, expected, strict=True)]
