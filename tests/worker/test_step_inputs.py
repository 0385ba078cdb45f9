"""What a step tells a GPU of its sequences' recurrent states."""

from __future__ import annotations

import numpy as np
import torch

from moeserve.messages.sampling import SamplingParams
from moeserve.messages.steps import NewSeq, Row
from moeserve.worker.engines.gpu.steps.step_inputs import StepInputs
from moeserve.worker.sequences import Sequences, StepLayout

CPU = torch.device("cpu")
SEQUENCES = 6


def filled(counts: dict[int, int]) -> StepInputs:
    """A step with so many rows of each request slot; the state of slot i is in state slot 10 + i."""
    sequences = Sequences(SEQUENCES, 200)
    for slot in counts:
        tokens = np.arange(200, dtype=np.int32).tobytes()
        sequences.bind(NewSeq(slot, tokens, 200, b"", SamplingParams(max_tokens=1), state_slot=10 + slot))
    rows = [Row(slot, 0, n, np.arange(n, dtype=np.int32).tobytes(), True) for slot, n in counts.items()]
    inputs = StepInputs(256, 8, SEQUENCES, CPU, max_model_len=200, num_kv_slots=400, has_states=True)
    inputs.fill(StepLayout(rows), sequences)
    inputs.copy()
    return inputs


def test_decode_rows_and_prompts_in_one_step() -> None:
    states = filled({4: 1, 1: 1, 0: 70, 3: 64}).batch(2, (torch.zeros(1, 4),), 0.0).states
    assert states is not None
    every = states.sequences
    assert every.first.tolist() == [0, 1, 2, 72, 0, 0]
    assert every.count.tolist() == [1, 1, 70, 64, 0, 0]
    assert every.slot.tolist()[:4] == [14, 11, 10, 13]
    assert every.row_sequence[:136].tolist() == [0, 1] + [2] * 70 + [3] * 64
    assert states.num_recurrent == 2
    assert states.chunked is not None
    assert states.chunks is not None
    assert (states.chunked.first.tolist(), states.chunked.count.tolist()) == ([2, 72], [70, 64])
    assert states.chunked.slot.tolist() == [10, 13]
    assert states.chunks.tolist() == [[2, 64], [66, 6], [72, 64]]
    aligned = (states.chunked.first, states.chunked.count, states.chunked.slot)
    assert {tensor.data_ptr() % 16 for tensor in aligned} == {0}  # kernels are compiled for it


def test_a_recorded_step_goes_through_all_sequences_there_may_be() -> None:
    inputs = filled({4: 1, 1: 5})
    states = inputs.batch(6, None, 0.0).states
    assert states is not None
    assert (states.num_recurrent, states.chunked) == (SEQUENCES, None)
    assert states.sequences.count.tolist() == [1, 5, 0, 0, 0, 0]


def test_a_model_without_states_has_none() -> None:
    inputs = StepInputs(16, 8, SEQUENCES, CPU, max_model_len=200, num_kv_slots=400)
    assert inputs.batch(1, None, 0.0).states is None


def test_a_dummy_step_stays_within_a_request_and_the_pools() -> None:
    """However large it is: before, a server of short requests or of a small pool read and wrote beyond their memory."""
    inputs = StepInputs(256, 8, SEQUENCES, CPU, max_model_len=90, num_kv_slots=50, has_windows=True)
    for n, start in ((256, 0), (40, 0), (30, 60)):
        inputs.fill_dummy(n, 1000, start)
        inputs.copy()
        batch = inputs.batch(n, None, 0.0)
        assert batch.window_slots is not None
        assert batch.positions.tolist() == [min(start + row, 89) for row in range(256)]
        slots = [row if row < min(n, 50) else -1 for row in range(256)]
        assert batch.kv_slots.tolist() == slots
        assert batch.window_slots.tolist() == slots
