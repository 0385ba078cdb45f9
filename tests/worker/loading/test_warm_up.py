"""What a GPU engine in the place of a lost one puts off, and when it does it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moeserve.models.adapters.scope import AdapterScope
from moeserve.models.blocks.gpu.layer_kinds import distinct_layers
from moeserve.worker.engines.gpu import warm_up
from moeserve.worker.engines.gpu.steps.graph_steps import GraphSteps
from moeserve.worker.engines.gpu.steps.step_inputs import StepInputs
from moeserve.worker.engines.gpu.steps.step_path import GraphFamily, GraphKey, StepFacts
from moeserve.worker.engines.gpu.warm_up import STEPS_PER_PIECE, WarmUp

SIZES = [1, 2, 4, 32]
CPU = torch.device("cpu")
FACTS = StepFacts(tuple(SIZES), max_decode_size=4, max_tiles={32: 4}, max_graph_decode=256)


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
        assert int(batch.count) == 0, "a step that only is captured has no rows"
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
def graphs(model: Model, inputs: dict[int, StepInputs]) -> GraphSteps:
    return GraphSteps(model, inputs, FACTS)  # type: ignore[arg-type]


def key(family: GraphFamily, size: int) -> GraphKey:
    return GraphKey(family, size, AdapterScope.NONE)


def replay(graphs: GraphSteps, model: Model) -> list[tuple[int, bool | None]]:
    """What all graphs launch, in the order in which they were captured."""
    model.launched.clear()
    for run in graphs._captured.values():
        run()
    return model.launched


def test_all_is_captured_before_the_first_step(
    graphs: GraphSteps, model: Model, inputs: dict[int, StepInputs]
) -> None:
    told: list[tuple[int, int]] = []
    for step in inputs.values():
        step.clear()
    graphs.capture_all(lambda done, total: told.append((done, total)))
    assert told == [(done, 6) for done in range(6)]
    assert replay(graphs, model) == [(4, True), (4, False), (2, True), (2, False), (1, True), (32, None)]
    assert graphs.late == 0
    assert not graphs.capture_next()


def test_what_was_asked_for_is_captured_first(
    graphs: GraphSteps, model: Model, inputs: dict[int, StepInputs]
) -> None:
    graphs.plan()
    assert graphs.find(key("prompts", 32)) is None
    assert graphs.find(key("decode", 2)) is None
    assert graphs.find(key("decode", 2)) is None
    assert graphs.find(key("decode", 32)) is None  # which never is
    assert graphs.late == 3
    assert [graphs.is_wanted, graphs.capture_next(), graphs.capture_next()] == [True, True, True]
    assert not graphs.is_wanted
    assert replay(graphs, model) == [(32, None), (2, True)]
    assert graphs.find(key("decode", 2)) is not None
    assert graphs.late == 3
    while graphs.capture_next():
        pass
    assert len(replay(graphs, model)) == 6


class Pieces:
    def __init__(self, graphs: GraphSteps, *drafting: Any) -> None:
        self.compiled: list[int] = []
        self.warm_up = WarmUp(graphs, self.compiled.extend, FACTS, None, None, drafting)


@pytest.fixture
def pieces(graphs: GraphSteps, monkeypatch: pytest.MonkeyPatch) -> Pieces:
    monkeypatch.setattr(warm_up, "compile_ahead", lambda *_: _Nothing())
    found = Pieces(graphs)
    found.warm_up.put_off()
    return found


class _Nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def test_where_nothing_waits_all_is_done_at_once(pieces: Pieces, graphs: GraphSteps, model: Model) -> None:
    rounds = 0
    while pieces.warm_up.go_on(is_idle=True):
        rounds += 1
    assert rounds == 6 + len(SIZES)
    assert len(replay(graphs, model)) == 6
    assert pieces.compiled == SIZES


def test_beside_steps_a_piece_waits_for_its_turn(pieces: Pieces, graphs: GraphSteps, model: Model) -> None:
    for _ in range(STEPS_PER_PIECE - 1):
        assert pieces.warm_up.go_on(is_idle=False)
    assert replay(graphs, model) == []
    assert pieces.warm_up.go_on(is_idle=False)
    assert replay(graphs, model) == [(4, True)]
    assert graphs.find(key("decode", 1)) is None
    missed = pieces.warm_up.missed
    assert pieces.warm_up.go_on(is_idle=False)  # a step has asked for it
    assert replay(graphs, model) == [(4, True), (1, True)]
    assert graphs.find(key("decode", 1)) is not None
    assert pieces.warm_up.missed == missed


class Drafting:
    """A part of a block that drafts, with two graphs."""

    compiled = captured = 0

    def compile(self) -> None:
        self.compiled += 1

    def capture_each(self) -> Iterator[None]:
        for _ in range(2):
            self.captured += 1
            yield


@pytest.mark.usefixtures("pieces")  # nothing is compiled
def test_graphs_of_a_block_that_drafts_are_captured_after_the_steps(graphs: GraphSteps) -> None:
    """Not before the first step, unless nothing is put off."""
    late, early = Drafting(), Drafting()
    warm_up = Pieces(graphs, late).warm_up
    warm_up.put_off()
    assert (late.compiled, late.captured) == (1, 0)
    captured = []
    while warm_up.go_on(is_idle=True):
        captured.append(late.captured)
    assert captured == [0] * 6 + [1, 2] + [2] * len(SIZES)
    Pieces(graphs, early).warm_up.capture()
    assert early.captured == 2


@pytest.mark.usefixtures("pieces")
def test_a_small_model_comes_last_unless_a_draft_waits(
    pieces: Pieces, graphs: GraphSteps, inputs: dict[int, StepInputs]
) -> None:
    drafting = Model()
    small = GraphSteps(drafting, inputs, FACTS)  # type: ignore[arg-type]
    of_small = Pieces(small)
    of_small.warm_up.put_off()
    pieces.warm_up.go_on_with(of_small.warm_up)
    missed = pieces.warm_up.missed
    assert small.find(key("decode", 2)) is None  # a draft asks for it
    assert pieces.warm_up.missed == missed + 1
    assert pieces.warm_up.go_on(is_idle=False)
    assert replay(small, drafting) == [(2, True)]
    for _ in range(6 + len(SIZES)):
        assert pieces.warm_up.go_on(is_idle=True)
    assert pieces.compiled == SIZES
    assert replay(small, drafting) == [(2, True)]
    for _ in range(STEPS_PER_PIECE):
        assert pieces.warm_up.go_on(is_idle=False)
    assert len(replay(small, drafting)) > 1
    while pieces.warm_up.go_on(is_idle=True):
        pass
    assert len(replay(small, drafting)) == 6
    assert of_small.compiled == SIZES


def test_an_engine_that_has_put_off_nothing_has_nothing_to_do(graphs: GraphSteps) -> None:
    assert not Pieces(graphs).warm_up.go_on(is_idle=True)


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
