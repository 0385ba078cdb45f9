"""How a GPU executes a step, as a function of its rows and of the engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.models.adapters.scope import AdapterScope
from moeserve.models.step_buffers import SMALL_BATCH_ROWS, step_sizes
from moeserve.worker.engines.gpu.steps.expert_streaming import Streaming
from moeserve.worker.engines.gpu.steps.step_path import (
    GraphKey,
    StepFacts,
    StepPath,
    StepShape,
    captured_path,
    decode_sizes_in_parts,
    graph_keys,
    kernel_paths,
    padded_size,
    part_choices,
    path_of,
    path_of_part,
    sequences_alone,
)

NONE, ATTENTION, ALL = AdapterScope.NONE, AdapterScope.ATTENTION, AdapterScope.ALL
SIZES = tuple(step_sizes(2048))
# All experts on the GPU: decode steps of up to 256 rows and prompts of up to 1,024 have graphs.
WHOLE = StepFacts(
    SIZES,
    max_decode_size=256,
    max_tiles={size: size // 16 + 64 for size in SIZES if SMALL_BATCH_ROWS < size <= 1024},
    tile_tokens=16,
    max_graph_decode=256,
)
IN_RAM = StepFacts(SIZES, max_decode_size=256, can_stream=True, streaming=Streaming(((64, 0.25), (256, 1.0))))
IN_PARTS = replace(
    WHOLE,
    takes_parts=True,
    decode_parts=frozenset(decode_sizes_in_parts(WHOLE)),
    prompt_parts={size: 4 for size in SIZES if size >= 128},
)


def shape(*counts: int, **options: bool) -> StepShape:
    return StepShape(np.array(counts, np.int32), sum(counts), **options)  # type: ignore[arg-type]


def drafting(streams: int, drafts: int, *chunks: int) -> StepShape:
    """Returns a step of `streams` sequences with `drafts` drafts each, then chunks of these sizes."""
    counts = np.array([1 + drafts] * streams + list(chunks), np.int32)
    return StepShape(
        counts, int(counts.sum()), drafted=np.array([drafts] * streams + [0] * len(chunks), np.int32)
    )


def decode(rows: int, **options: bool) -> StepShape:
    return shape(*[1] * rows, **options)


@pytest.mark.parametrize(
    ("step", "graph"),
    [
        (decode(1), ("decode", 1)),
        (decode(5), ("decode", 8)),
        (decode(1, has_new=True), ("decode", 1)),  # there is no other row to read
        (decode(5, has_new=True), ("small", 8)),
        (shape(1, 6), ("small", 8)),
        (decode(5, is_observed=True), None),
        (decode(200), ("decode", 256)),
        (decode(200, has_new=True), ("prompts", 256)),
        (
            decode(257),
            None,
        ),  # more rows than the head takes, or a prompts graph has calls of decode attention
        (decode(300, has_new=True), None),
        (shape(*[1] * 256, 300), ("prompts", 1024)),
        (shape(*[1] * 257, 300), None),
        (shape(9), ("prompts", 16)),
        (shape(1024), ("prompts", 1024)),
        (shape(1025), None),
        (shape(*[2] * 128), None),  # 128 tiles, where 80 have room
        (shape(*[2] * 80), ("prompts", 256)),
    ],
)
def test_which_graph(step: StepShape, graph: tuple[str, int] | None) -> None:
    path = path_of(step, WHOLE)
    assert (None if path.graph is None else path.graph[:2]) == graph
    assert path.launches_at_once == (graph is not None)
    assert path.part_rows == 0


def test_prompts_stream_experts_and_decode_rows_do_not() -> None:
    found = [
        path_of(step, IN_RAM) for step in (shape(1, 159), decode(160), shape(20), shape(2, 500), shape(6))
    ]
    assert [path.streamed for path in found] == [0.625, 0.0, 0.0, 1.0, 0.0]
    assert [path.graph and path.graph.family for path in found] == [None, "decode", None, None, "small"]


@pytest.mark.parametrize(
    ("step", "graph", "num_decode"),
    [
        (drafting(1, 3), ("small", 4), 4),
        (drafting(3, 4), ("drafts", 16), 15),
        (drafting(64, 3), ("drafts", 256), 256),
        (drafting(65, 3), ("prompts", 512), 260),  # more rows than the head takes at once
        (drafting(3, 4, 40), ("prompts", 64), 15),
        (drafting(3, 4, 40, 30), ("prompts", 128), 15),
        (drafting(2, 1, 3), ("small", 8), 7),
    ],
)
def test_drafts(step: StepShape, graph: tuple[str, int], num_decode: int) -> None:
    """Each drafted row attends by itself, also beside chunks."""
    path = path_of(step, replace(WHOLE, max_drafts_size=256, max_graph_decode=512))
    assert (path.graph and path.graph[:2], path.num_decode) == (graph, num_decode)
    assert not path.is_independent


def test_a_server_of_few_streams_has_decode_graphs_of_as_many_rows() -> None:
    """But every small graph: a short chunk, or drafts, have more rows than there are streams."""
    facts = replace(WHOLE, max_decode_size=2)
    assert path_of(decode(2, has_new=True), facts).graph == ("small", 2, NONE)
    assert path_of(shape(1, 3), facts).graph == ("small", 4, NONE)
    assert [graph.size for graph in graph_keys(facts) if graph.family == "decode"] == [2, 1]


@pytest.mark.parametrize(
    ("step", "family", "part_rows"),
    [
        (decode(65), "decode parts", 64),
        (decode(64), "decode parts", 32),
        (decode(33), "decode parts", 32),
        (decode(32), "decode", 0),
        (decode(65, has_new=True), None, 32),
        (shape(1, 200), None, 64),
        (shape(1, 63), "prompts", 0),
        (shape(1, 200, is_observed=True), None, 0),
    ],
)
def test_parts(step: StepShape, family: str | None, part_rows: int) -> None:
    path = path_of(step, IN_PARTS)
    assert (path.graph and path.graph.family, path.part_rows) == (family, part_rows)


def test_a_decode_step_that_fits_one_part_goes_whole() -> None:
    facts = replace(IN_PARTS, decode_parts=frozenset({256}))
    assert path_of(decode(129), facts).part_rows == 128
    assert path_of(decode(65), facts).graph == ("decode", 128, NONE)


def test_rows_that_ask_for_adapters_go_whole() -> None:
    step = decode(100)._replace(scope=ATTENTION)
    assert path_of(step, IN_PARTS).graph == ("decode", 128, ATTENTION)
    assert path_of(shape(1, 200)._replace(scope=ALL), IN_PARTS).part_rows == 0


def test_too_many_rows() -> None:
    with pytest.raises(ValueError, match="a step of 2049 rows, and the largest size is 2048"):
        path_of(shape(2049), WHOLE)


def test_into_how_many_parts_a_step_may_go() -> None:
    assert [part_choices(size) for size in (16, 32, 64, 256, 4096)] == [
        [1],
        [1],
        [1, 2],
        [1, 2, 4, 8],
        [1, 2, 4, 8],
    ]
    assert decode_sizes_in_parts(WHOLE) == [64, 128, 256]


@st.composite
def any_facts(draw: st.DrawFn) -> StepFacts:
    sizes = tuple(step_sizes(draw(st.sampled_from([8, 64, 2048]))))
    base = draw(st.sampled_from([WHOLE, IN_RAM, IN_PARTS]))
    largest = draw(st.sampled_from([size for size in sizes if size <= 256]))
    facts = replace(
        base,
        sizes=sizes,
        max_decode_size=largest,
        max_tiles={size: most for size, most in base.max_tiles.items() if size in sizes},
        max_drafts_size=draw(st.sampled_from([0, sizes[-1] // 2, sizes[-1]])),
        scopes=draw(st.sampled_from([(NONE,), (NONE, ATTENTION, ALL)])),
        spans_see_ahead=draw(st.booleans()),
    )
    return replace(facts, decode_parts=facts.decode_parts & set(decode_sizes_in_parts(facts)))


@st.composite
def any_step(draw: st.DrawFn, facts: StepFacts) -> StepShape:
    ones = draw(st.integers(0, 300))
    chunks = draw(st.lists(st.integers(2, 700), max_size=100))
    counts: list[int] = []
    for count in [1] * ones + chunks:
        room = facts.sizes[-1] - sum(counts)
        if room < count:
            break
        counts.append(count)
    counts = counts or [1]
    drafted = None
    if facts.max_drafts_size and draw(st.booleans()):
        most = (facts.sizes[-1] - sum(counts)) // len(counts)
        drafted = np.array(
            [draw(st.integers(0, min(most, 4))) if count == 1 else 0 for count in counts], np.int32
        )
    total = np.array(counts, np.int32) + (0 if drafted is None else drafted)
    return StepShape(
        total,
        int(total.sum()),
        draw(st.booleans()),
        draw(st.sampled_from(facts.scopes)),
        draw(st.booleans()),
        facts.spans_see_ahead and draw(st.booleans()),
        drafted,
    )


@given(st.data())
def test_every_path_is_prepared_for(data: st.DataObject) -> None:
    """Its graph is one that is captured, with room for the step, and its kernels are compiled ahead; so are those of
    its parts and of its graph."""
    facts = data.draw(any_facts())
    step = data.draw(any_step(facts))
    path = path_of(step, facts)
    assert path.size == padded_size(step.num_rows, facts.sizes)
    check_rows(path, step)
    check_kernels(path, facts)
    if path.graph is not None and not path.part_rows:
        check_captured(path, path.graph, step, facts)
    if path.graph is not None and path.part_rows:
        assert path.graph.size in decode_sizes_in_parts(facts)
        assert path.part_rows < step.num_rows <= 2 * path.part_rows
    if path.graph is None and path.part_rows:
        rest = step.num_rows - path.part_rows * ((step.num_rows - 1) // path.part_rows)
        check_kernels(path_of_part(np.array([rest], np.int32), rest, facts), facts)
    if step.is_observed:
        assert (path.graph, path.part_rows) == (None, 0)


def check_rows(path: StepPath, step: StepShape) -> None:
    """Rows before `num_decode` are of sequences with one token and its drafts, unless all rows are; no chunk is cut."""
    assert path.has_tiles == (path.num_decode < step.num_rows)
    known = step.counts if step.drafted is None else step.counts - step.drafted
    if path.has_tiles:
        assert not path.is_independent
        alone = sequences_alone(step.counts, path.num_decode)
        assert step.counts[:alone].sum() == path.num_decode
        assert (known[:alone] == 1).all()
        assert known[alone] > 1
    else:
        assert path.streamed == 0.0


def check_kernels(path: StepPath, facts: StepFacts) -> None:
    assert path.kernels in [prepared.kernels for prepared in kernel_paths(path.size, facts)]


def check_captured(path: StepPath, graph: GraphKey, step: StepShape, facts: StepFacts) -> None:
    assert graph in list(graph_keys(facts))
    captured = captured_path(graph, facts)
    assert (captured.size, captured.scope) == (path.size, path.scope)
    assert captured.num_decode >= path.num_decode
    assert captured.is_independent <= path.is_independent, "a row may read another one's KV"
    if path.has_tiles:
        assert captured.has_tiles
        assert not path.sees_ahead
        chunks = step.counts[sequences_alone(step.counts, path.num_decode) :].tolist()
        tiles = sum(-(-count // facts.tile_tokens) for count in chunks)
        assert tiles <= facts.max_tiles[graph.size]
    if graph.has_head:
        largest = {"small": SMALL_BATCH_ROWS, "drafts": facts.max_drafts_size}
        assert graph.size <= largest.get(graph.family, facts.max_decode_size)


@pytest.mark.parametrize(
    "facts", [WHOLE, IN_PARTS, replace(WHOLE, scopes=(NONE, ATTENTION)), replace(WHOLE, max_drafts_size=256)]
)
def test_every_graph_is_some_steps(facts: StepFacts) -> None:
    """None is captured for nothing."""
    whole = replace(facts, decode_parts=frozenset(), prompt_parts={})
    for graph in graph_keys(facts):
        rows = graph.size
        step = {
            "decode": decode(rows),
            "small": decode(rows, has_new=True),
            "drafts": drafting(rows // 4, 3),
            "prompts": shape(rows),
        }[graph.family]
        assert path_of(step._replace(scope=graph.scope), whole).graph == graph
