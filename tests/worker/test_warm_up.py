"""What a GPU engine in the place of a lost one puts off, and when it does it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moeserve.models.adapters.scope import AdapterScope
from moeserve.models.blocks.gpu.layer_kinds import distinct_layers
from moeserve.worker.engines.gpu import warm_up
from moeserve.worker.engines.gpu.steps.graph_steps import RecordedSteps, StepKind
from moeserve.worker.engines.gpu.steps.step_inputs import StepInputs
from moeserve.worker.engines.gpu.warm_up import STEPS_PER_PIECE, WarmUp

SIZES = [1, 2, 4, 32]
CPU = torch.device("cpu")


class Model:
    """Notes what is launched: the size, and whether rows are independent; a step with prompts has None."""

    def __init__(self) -> None:
        self.device = CPU
        self.sizes = self.head_sizes = SIZES
        self.adapters = None
        self.has_head = True
        self.launched: list[tuple[int, bool | None]] = []

    def begin(self, batch: object = None) -> None:
        pass

    def forward(self, batch: Any) -> None:
        assert int(batch.count) == 0, "a step that only is recorded has no rows"
        independent = None if batch.tiles is not None else batch.rows_independent
        self.launched.append((len(batch.token_ids), independent))

    def logits(self, size: int, rows: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return torch.zeros(size, 8)


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def inputs() -> dict[int, StepInputs]:
    """As a step has left them: with rows."""
    made = {}
    for size in SIZES:
        made[size] = StepInputs(
            size, 4, 6, CPU, max_model_len=64, num_kv_slots=64, max_tiles=4 if size == 32 else 0
        )
        made[size].fill_dummy(size, 100)
    return made


@pytest.fixture
def recorded(model: Model, inputs: dict[int, StepInputs]) -> RecordedSteps:
    return RecordedSteps(model, inputs)  # type: ignore[arg-type]


def kind(size: int) -> StepKind:
    return StepKind(size, AdapterScope.NONE)


def replay(recorded: RecordedSteps, model: Model) -> list[tuple[int, bool | None]]:
    """What all recorded steps launch, in the order in which they were recorded."""
    model.launched.clear()
    for run in recorded._recorded.values():
        run()
    return model.launched


def test_all_is_recorded_before_the_first_step(
    recorded: RecordedSteps, model: Model, inputs: dict[int, StepInputs]
) -> None:
    told: list[tuple[int, int]] = []
    for step in inputs.values():
        step.clear()
    recorded.record(4, lambda done, total: told.append((done, total)))
    assert told == [(done, 6) for done in range(6)]
    assert replay(recorded, model) == [(4, True), (4, False), (2, True), (2, False), (1, True), (32, None)]
    assert recorded.late == 0
    assert not recorded.record_next()


def test_what_was_asked_for_is_recorded_first(
    recorded: RecordedSteps, model: Model, inputs: dict[int, StepInputs]
) -> None:
    recorded.plan(4)
    assert recorded.prompts(kind(32)) is None
    assert recorded.decode(kind(2), independent=True) is None
    assert recorded.decode(kind(2), independent=True) is None
    assert recorded.decode(kind(32), independent=True) is None  # which never is
    assert recorded.late == 3
    assert [recorded.is_wanted, recorded.record_next(), recorded.record_next()] == [True, True, True]
    assert not recorded.is_wanted
    assert replay(recorded, model) == [(32, None), (2, True)]
    assert recorded.decode(kind(2), independent=True) is not None
    assert recorded.late == 3
    while recorded.record_next():
        pass
    assert len(replay(recorded, model)) == 6


class Pieces:
    def __init__(self, recorded: RecordedSteps) -> None:
        self.compiled: list[int] = []
        self.warm_up = WarmUp(recorded, self.compiled.extend, SIZES, 4, None, None)


@pytest.fixture
def pieces(recorded: RecordedSteps, monkeypatch: pytest.MonkeyPatch) -> Pieces:
    monkeypatch.setattr(warm_up, "compile_ahead", lambda *_: _Nothing())
    found = Pieces(recorded)
    found.warm_up.put_off()
    return found


class _Nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def test_where_nothing_waits_all_is_done_at_once(
    pieces: Pieces, recorded: RecordedSteps, model: Model
) -> None:
    rounds = 0
    while pieces.warm_up.go_on(is_idle=True):
        rounds += 1
    assert rounds == 6 + len(SIZES)
    assert len(replay(recorded, model)) == 6
    assert pieces.compiled == SIZES


def test_beside_steps_a_piece_waits_for_its_turn(
    pieces: Pieces, recorded: RecordedSteps, model: Model
) -> None:
    for _ in range(STEPS_PER_PIECE - 1):
        assert pieces.warm_up.go_on(is_idle=False)
    assert replay(recorded, model) == []
    assert pieces.warm_up.go_on(is_idle=False)
    assert replay(recorded, model) == [(4, True)]
    assert recorded.decode(kind(1), independent=True) is None
    missed = pieces.warm_up.missed
    assert pieces.warm_up.go_on(is_idle=False)  # a step has asked for it
    assert replay(recorded, model) == [(4, True), (1, True)]
    assert recorded.decode(kind(1), independent=True) is not None
    assert pieces.warm_up.missed == missed


def test_an_engine_that_has_put_off_nothing_has_nothing_to_do(recorded: RecordedSteps) -> None:
    assert not Pieces(recorded).warm_up.go_on(is_idle=True)


def tensor(rows: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(rows, dtype=dtype)


@pytest.mark.parametrize(
    ("of_layers", "expected"),
    [
        ([(tensor(4), None), (tensor(4), None), (tensor(4), None), (tensor(4), None)], [0, 1]),
        ([tensor(4), tensor(4), tensor(8), tensor(8), tensor(4), tensor(4), tensor(8)], [0, 1, 2, 3, 4]),
        ([tensor(4), tensor(4, torch.int64), tensor(4), tensor(4, torch.int64)], [0, 1, 2]),
        ([object(), object(), object()], [0, 1, 2]),  # not known: each is like nothing else
        ([torch.empty(64, dtype=torch.uint8)[i : i + 4] for i in (0, 16, 16, 3, 19)], [0, 1, 3, 4]),
    ],
    ids=["all alike", "two sizes", "two types", "unknown", "alignment"],
)
def test_layers_that_stand_for_others(of_layers: list[object], expected: list[int]) -> None:
    assert distinct_layers(of_layers) == expected
