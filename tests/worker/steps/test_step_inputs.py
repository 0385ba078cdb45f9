"""What a step tells a GPU of its sequences' recurrent states."""

from __future__ import annotations

import numpy as np
import torch

from moeserve.messages.sampling import SamplingParams
from moeserve.messages.steps import NewSeq, Row
from moeserve.worker.engines.gpu.steps.step_columns import DECLARED, ColumnLayout, ColumnSizes
from moeserve.worker.engines.gpu.steps.step_inputs import StepInputs
from moeserve.worker.engines.gpu.steps.step_path import StepPath
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


def alone(rows: int) -> StepPath:
    """A step whose rows attend each by itself."""
    return StepPath(256, rows, has_tiles=False)


def test_decode_rows_and_prompts_in_one_step() -> None:
    path = StepPath(256, 2, has_tiles=True)
    states = filled({4: 1, 1: 1, 0: 70, 3: 64}).batch(path, (torch.zeros(1, 4),)).states
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


def test_a_step_without_tiles_goes_through_all_sequences_there_may_be() -> None:
    inputs = filled({4: 1, 1: 5})
    states = inputs.batch(alone(6)).states
    assert states is not None
    assert (states.num_recurrent, states.chunked) == (SEQUENCES, None)
    assert states.sequences.count.tolist() == [1, 5, 0, 0, 0, 0]


def test_a_model_without_states_has_none() -> None:
    inputs = StepInputs(16, 8, SEQUENCES, CPU, max_model_len=200, num_kv_slots=400)
    assert inputs.batch(alone(1)).states is None


def test_a_dummy_step_stays_within_a_request_and_the_pools() -> None:
    """However large it is: before, a server of short requests or of a small pool read and wrote beyond their memory."""
    inputs = StepInputs(256, 8, SEQUENCES, CPU, max_model_len=90, num_kv_slots=50, has_windows=True)
    for n, start in ((256, 0), (40, 0), (30, 60)):
        inputs.fill_dummy(n, 1000, start)
        inputs.copy()
        batch = inputs.batch(alone(n))
        assert batch.window_slots is not None
        assert batch.positions.tolist() == [min(start + row, 89) for row in range(256)]
        slots = [row if row < min(n, 50) else -1 for row in range(256)]
        assert batch.kv_slots.tolist() == slots
        assert batch.window_slots.tolist() == slots


SIZES = ColumnSizes(
    rows=5, sampled=9, head_calls=2, states=3, state_rows=5, window_rows=5, adapter_rows=5, tiles=2
)


def test_the_columns_of_host_and_device_are_the_same_memory_once_copied() -> None:
    """Each column has its place, at an address that kernels are compiled for, and no two columns share any."""
    layout = ColumnLayout(SIZES)
    host = np.zeros(layout.num_ints, np.int32)
    columns = layout.views(host)
    for number, name in enumerate(DECLARED, 1):
        values = getattr(columns, name)
        assert not values.any(), f"{name} lies over another column"
        values[:] = number
        assert (values.ctypes.data - host.ctypes.data) % 16 == 0
    device = layout.views(torch.from_numpy(host.copy()))
    for number, (name, column) in enumerate(DECLARED.items(), 1):
        width = getattr(SIZES, column.width)
        assert getattr(device, name).tolist() == (
            [number] * width if column.of == 1 else [[number] * column.of] * width
        )


def test_columns_that_a_model_does_not_need_take_no_room() -> None:
    bare, whole = ColumnLayout(ColumnSizes(rows=5, sampled=9, head_calls=2)), ColumnLayout(SIZES)
    views = bare.views(np.zeros(bare.num_ints, np.int32))
    assert [
        len(getattr(views, name)) for name in ("window_slots", "adapter_slots", "state_first", "tiles")
    ] == [0] * 4
    assert bare.num_ints < whole.num_ints


def test_what_a_larger_step_has_left_is_padded_over() -> None:
    inputs = StepInputs(
        16, 8, SEQUENCES, CPU, max_model_len=200, num_kv_slots=400, has_windows=True, has_states=True
    )
    inputs.fill_dummy(16, 1000, is_prompt=False)
    sequences = Sequences(SEQUENCES, 200, has_window_slots=True)
    slots = np.array([7, 9], np.int32).tobytes()
    inputs.fill(StepLayout([Row(3, 4, 2, slots, True, slots)]), sequences)
    inputs.copy()
    batch = inputs.batch(alone(2))
    assert int(batch.count) == 2
    assert batch.positions.tolist() == [4, 5] + [0] * 14
    assert batch.kv_slots.tolist() == [7, 9] + [-1] * 14
    assert batch.req_slots.tolist() == [3, 3] + [SEQUENCES] * 14
    assert batch.window_slots is not None
    assert batch.window_slots.tolist() == [7, 9] + [-1] * 14
    assert batch.states is not None
    assert batch.states.sequences.count.tolist() == [2, 0, 0, 0, 0, 0]
    rows, slots_of_rows, count = inputs.head(0, 1)
    assert [rows.tolist(), slots_of_rows.tolist(), count.tolist()] == [[1], [3], [1]]
