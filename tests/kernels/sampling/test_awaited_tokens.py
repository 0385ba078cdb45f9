"""Tokens of a step that is launched before the host has seen them: what stands in their place, and how a GPU takes them
(under Triton's interpreter, or on a GPU where there is one)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.triton_device import DEVICE, counter  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.embed import reference
from moeserve.kernels.embed.op import add_deep, embed, take_sampled
from moeserve.messages.sampling import SamplingParams
from moeserve.messages.steps import NewSeq, Row
from moeserve.quantization.table import F32
from moeserve.worker.engines.gpu.steps.step_inputs import StepInputs
from moeserve.worker.sequences import Sequences, StepLayout


@pytest.mark.parametrize("n", [1, 5, 300])
def test_tokens_are_taken_where_they_are_awaited(n: int) -> None:
    random = torch.Generator().manual_seed(n)
    ids = torch.randint(0, 1000, (n,), generator=random, dtype=torch.int32)
    ids[1::4] = reference.EMBEDDED
    ids[::2] = -1 - torch.randint(0, 40, (len(ids[::2]),), generator=random, dtype=torch.int32)
    sampled = torch.randint(-2, 1000, (32,), generator=random, dtype=torch.int32)
    expected = reference.take_sampled(ids, sampled)
    assert ((expected >= 0) | (expected == reference.EMBEDDED)).all()
    found = ids.to(DEVICE)
    take_sampled(found, sampled.to(DEVICE))
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("hidden", [96, 2048])
def test_rows_of_embeddings(hidden: int) -> None:
    """The embedding kernel leaves their x as it is; DeepStack adds to them alone."""
    random = torch.Generator().manual_seed(3)
    table = torch.randn(9, hidden, generator=random)
    x, deep = torch.randn(5, hidden, generator=random), torch.randn(5, 3 * hidden, generator=random)
    ids = torch.tensor([4, reference.EMBEDDED, 8, reference.EMBEDDED, reference.EMBEDDED], dtype=torch.int32)
    count, planes = (
        counter(4),
        [table[None].to(DEVICE), *[torch.empty(0, dtype=torch.int32, device=DEVICE)] * 2],
    )
    found = x.to(DEVICE)
    embed(ids.to(DEVICE), count, planes, int(F32), found)
    expected = torch.stack([table[4], x[1], table[8], x[3], x[4]])
    assert torch.equal(found.cpu(), expected)
    add_deep(ids.to(DEVICE), count, deep.to(DEVICE)[:, hidden : 2 * hidden], found)
    added = reference.add_deep(ids, deep[:, hidden : 2 * hidden], expected)
    added[4] = x[4]  # behind the step's rows
    assert torch.equal(found.cpu(), added)


def test_a_step_takes_the_tokens_of_the_one_before() -> None:
    """In the order in which they were sampled, which is not that of this step's rows; a last one has no place."""
    sequences = Sequences(4, 12)
    for slot in range(4):
        tokens = np.full(8 + slot, 40 + slot, np.int32)
        known = SamplingParams(max_tokens=9)
        sequences.bind(NewSeq(slot, tokens.tobytes(), 8 + slot, b"", known))
    slots = np.array([3, 0, 2], np.int32)
    before = np.array([12, 8, 10], np.int32)
    sequences.expect(slots, before)
    rows = [Row(slot, start, 1, bytes(4), True) for slot, start in ((0, 8), (1, 8), (2, 10))]
    inputs = StepInputs(4, 4, 4, torch.device(DEVICE), max_model_len=12, num_kv_slots=9)
    sampled = torch.tensor([7, 8, -1, 5], dtype=torch.int32, device=DEVICE)
    inputs.fill(StepLayout(rows), sequences)
    inputs.copy(sampled)
    assert inputs.token_ids.tolist() == [8, 41, 0, 0]  # what failed (-1) is a token that has an embedding
    sequences.append(slots, before, np.array([7, 8, -1], np.int32))
    inputs.fill(StepLayout(rows), sequences)
    inputs.copy()  # nothing is awaited
    assert inputs.token_ids.tolist() == [8, 41, 0, 0]
