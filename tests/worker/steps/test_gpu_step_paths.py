"""A GPU engine launches what `path_of` says: random steps of engines of every kind, whose model notes what it is
given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from moeserve.messages.steps import Row
from moeserve.models.adapters.scope import AdapterScope
from moeserve.models.blocks.gpu.workspace import MIXED_DECODE_ROWS
from moeserve.models.latent import AttentionForm
from moeserve.models.step_buffers import step_sizes
from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.engines.gpu.steps.expert_streaming import Streaming
from moeserve.worker.engines.gpu.steps.slot_tables import SlotTables
from moeserve.worker.engines.gpu.steps.step_path import StepPath, StepShape, captured_path, path_of
from moeserve.worker.sequences import Sequences, StepLayout

CPU = torch.device("cpu")
STREAMS, LENGTH, STEPS = 300, 4096, 30


class Launched(NamedTuple):
    """A call of the decoder."""

    size: int
    rows: int
    num_decode: int
    tiles: list[list[int]] | None  # of the first form, those that exist
    is_independent: bool
    streamed: float
    scope: AdapterScope
    decode_counts: list[int] | None
    is_observed: bool
    part: int  # its first row in the step


class Adapters:
    scopes = (AdapterScope.ATTENTION, AdapterScope.ALL)

    def scope_for(self, asked: list[int]) -> AdapterScope:
        return (AdapterScope.NONE, *self.scopes)[1 + max(asked)]


class Model:
    def __init__(
        self, *, forms: int = 1, adapters: bool = False, stage: bool = False, can_stream: bool = False
    ) -> None:
        form = AttentionForm(8, 2, 128, 128)
        self.shape = SimpleNamespace(
            forms=(form,) * forms,
            heads=form,
            vocab_size=64,
            rope_sections=None,
            spans_see_ahead=False,
            ngrams=None,
            indexer=None,
        )
        self.device = CPU
        self.sizes = step_sizes(2048)
        self.head_sizes = self.sizes[:9]
        self.adapters = Adapters() if adapters else None
        self.stage = SimpleNamespace(takes_parts=True) if stage else None
        self.has_states, self.has_head, self.can_stream, self.num_kv_slots = False, True, can_stream, LENGTH
        self.has_state_drafts, self.next_token, self.table = False, None, None
        self.launched: list[Launched] = []
        self.heads = 0

    def begin(self, batch: object = None) -> None:
        pass

    def check(self) -> None:
        pass

    def clear_ngrams(self, size: int) -> None:
        pass

    def streams(self, batch: Any) -> bool:
        return bool(batch.streamed)

    def forward(self, batch: Any, observer: object = None, part: Any = None) -> None:
        counts = batch.decode_counts
        self.launched.append(
            Launched(
                len(batch.token_ids),
                int(batch.count),
                batch.num_decode,
                None if batch.tiles is None else [tile for tile in batch.tiles[0].tolist() if tile[1]],
                batch.rows_independent,
                batch.streamed,
                AdapterScope.NONE if batch.adapters is None else batch.adapters.scope,
                None if counts is None else [int(count) for count in counts],
                observer is not None,
                0 if part is None else part.first_row,
            )
        )

    def logits(self, size: int, rows: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        self.heads += 1
        return torch.zeros(len(rows), 64)


def engine_of(model: Model, max_drafts: int = 0) -> GpuEngine:
    in_ram = SimpleNamespace(stream=SimpleNamespace(threads=1), disk=None) if model.can_stream else None
    tables = SlotTables.empty(STREAMS + 1, LENGTH, CPU, has_windows=False)
    engine = GpuEngine(model, tables, STREAMS, "a GPU ()", in_ram, max_drafts=max_drafts)  # type: ignore[arg-type]
    if model.can_stream:
        engine.stream_by(Streaming(((64, 0.25), (256, 1.0))), "streamed")
    engine.warm_up.capture()
    return engine


def random_rows(rng: np.random.Generator) -> list[Row]:
    """Decode rows first, as the router plans them; up to 2,048 tokens."""
    rows: list[Row] = []
    room = 2048
    ones, chunks = int(rng.choice([0, 1, 3, 8, 70, 280])), int(rng.choice([0, 0, 1, 2, 90]))
    for slot in rng.permutation(STREAMS)[: max(1, ones + chunks)].tolist():
        count = 1 if len(rows) < ones else int(rng.choice([2, 3, 7, 64, 65, 400]))
        if count > room:
            break
        kv = np.arange(count, dtype=np.int32).tobytes()
        rows.append(Row(slot, int(rng.integers(0, 1000)), count, kv, True))
        room -= count
    return rows


def with_drafts(rows: list[Row], most: int, rng: np.random.Generator) -> StepLayout:
    """Some of the decode rows have up to `most`, as far as a step has room."""
    drafted, room = [0] * len(rows), 2048 - sum(row.count for row in rows)
    for at, row in enumerate(rows):
        if row.count == 1:
            drafted[at] = min(int(rng.integers(0, most + 1)), room)
            room -= drafted[at]
    placed = [
        msgspec.structs.replace(row, count=row.count + more, kv_slots=bytes(4 * (row.count + more)))
        for row, more in zip(rows, drafted, strict=True)
    ]
    return StepLayout(placed, drafted if any(drafted) else None)


@pytest.mark.parametrize(
    ("options", "drafts"),
    [
        ({}, 0),
        ({"forms": 2}, 0),
        ({"adapters": True}, 0),
        ({"can_stream": True}, 0),
        ({"stage": True}, 0),
        ({}, 3),
        ({"can_stream": True}, 3),
    ],
    ids=[
        *("all on the GPU", "two forms of attention", "adapters", "experts in RAM", "stages"),
        *("drafts", "drafts, experts in RAM"),
    ],
)
def test_what_is_launched_is_what_the_path_says(options: dict[str, Any], drafts: int) -> None:
    model = Model(**options)
    engine, rng = engine_of(model, drafts), np.random.default_rng(5)
    sequences = Sequences(STREAMS, LENGTH)
    ways = set()
    for _ in range(STEPS):
        layout = with_drafts(random_rows(rng), drafts, rng)
        if options.get("adapters"):
            sequences.adapters[:] = rng.integers(-1, rng.integers(0, 3), STREAMS)
        has_new, observer = bool(rng.random() < 0.3), object() if rng.random() < 0.1 else None
        scope = AdapterScope.NONE
        if model.adapters is not None:
            scope = model.adapters.scope_for(sequences.adapters[layout.req_slot].tolist())
        shape = StepShape(
            layout.count, layout.n, has_new, scope, observer is not None, drafted=layout.drafted
        )
        path = path_of(shape, engine.facts)
        model.launched.clear()
        model.heads = 0
        engine.forward(layout, sequences, has_new=has_new, observer=observer)  # type: ignore[arg-type]
        assert model.heads == (path.graph is not None and path.graph.has_head)
        if path.part_rows:
            check_parts(model.launched, path, layout)
        else:
            check_whole(model.launched, path, layout, engine, is_observed=observer is not None)
        ways.add((path.graph and path.graph.family, path.part_rows > 0))
    assert len(ways) >= 3, "too few kinds of steps to say anything"
    assert bool(drafts) == (("drafts", False) in ways)


def check_whole(
    launched: list[Launched], path: StepPath, layout: StepLayout, engine: GpuEngine, *, is_observed: bool
) -> None:
    (found,) = launched
    of_graph = path if path.graph is None else captured_path(path.graph, engine.facts)
    assert found[:3] == (path.size, layout.n, of_graph.num_decode)
    assert (found.is_independent, found.scope) == (of_graph.is_independent, path.scope)
    assert (found.streamed, found.is_observed) == (path.streamed, is_observed)
    assert (found.tiles is not None) == of_graph.has_tiles
    if found.tiles is not None:
        tokens = sum(tile[1] for tile in found.tiles)
        assert tokens == layout.n - path.num_decode
    check_decode_counts(found, path.num_decode)


def check_parts(launched: list[Launched], path: StepPath, layout: StepLayout) -> None:
    firsts = range(0, layout.n, path.part_rows)
    assert [part.part for part in launched] == list(firsts)
    assert [part.rows for part in launched] == [min(path.part_rows, layout.n - first) for first in firsts]
    assert {part.is_independent for part in launched} == {path.graph is not None}
    for part in launched:
        assert (part.streamed, part.scope, part.is_observed) == (0.0, AdapterScope.NONE, False)
        in_tiles = 0 if part.tiles is None else sum(tile[1] for tile in part.tiles)
        alone = part.rows if path.graph is not None else part.num_decode
        assert alone + in_tiles == part.rows
        check_decode_counts(part, part.num_decode)


def check_decode_counts(found: Launched, num_decode: int) -> None:
    """Beside prompts, no call of decode attention is told of more rows than its own: beyond them it counted in other
    tensors' memory, and two H200s met an illegal address."""
    if found.tiles is None:
        assert found.decode_counts is None
        return
    assert found.decode_counts is not None
    for call, count in enumerate(found.decode_counts):
        assert count == min(max(num_decode - MIXED_DECODE_ROWS * call, 0), MIXED_DECODE_ROWS)
    assert sum(found.decode_counts) == num_decode


def test_a_step_whose_graph_is_still_to_be_captured_runs_kernel_by_kernel() -> None:
    model = Model()
    tables = SlotTables.empty(STREAMS + 1, LENGTH, CPU, has_windows=False)
    engine = GpuEngine(model, tables, STREAMS, "a GPU ()")  # type: ignore[arg-type]
    engine.warm_up.put_off()
    sequences = Sequences(STREAMS, LENGTH)
    layout = StepLayout([Row(0, 5, 40, np.arange(40, dtype=np.int32).tobytes(), True)])
    for is_captured in (False, True):
        model.launched.clear()
        engine.forward(layout, sequences, has_new=False, observer=None)
        (found,) = model.launched
        assert found.num_decode == (64 if is_captured else 0)  # a graph's is the most of any step
        check_decode_counts(found, 0)
        assert sum(tile[1] for tile in found.tiles or ()) == 40
        engine.warm_on(is_idle=False)


def test_a_plan_may_follow_if_its_step_is_a_graph() -> None:
    engine = engine_of(Model())
    counts = {"decode": [1] * 256, "more rows than the head takes": [1] * 257, "a prompt": [1, 500],
              "more tiles than there is room for": [2] * 1000, "a long prompt": [1500]}  # fmt: skip
    found = {name: engine.launches_at_once(tokens, [0] * len(tokens)) for name, tokens in counts.items()}
    assert [name for name, at_once in found.items() if at_once] == ["decode", "a prompt"]
    drafting = engine_of(Model(), max_drafts=3)
    assert drafting.facts.max_drafts_size >= 32
    assert drafting.launches_at_once([4] * 8, [3] * 8)


def test_decode_steps_of_more_rows_than_the_head_takes_are_timed() -> None:
    """They have no graph. A server of --max-num-seqs 512 ended here, at its start."""
    model = Model()
    engine = engine_of(model)
    launched = []
    for rows in (256, 512):
        run = engine.dummy_steps.decode(rows)
        model.launched.clear()
        run()
        launched += [(found.size, found.rows, found.num_decode, found.tiles) for found in model.launched]
    assert launched == [(256, 256, 256, None), (512, 512, 512, None)]
