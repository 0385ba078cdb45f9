"""How a GPU executes a step: as a CUDA graph, kernel by kernel, or in parts. Pure: no torch, no device, no state.

`path_of` alone decides. Its callers:

    GpuEngine.forward       executes the path (`step_launcher.py`)
    GraphSteps              captures the graphs that a path can name: `graph_keys`, `captured_path`
    compile_ahead.py        launches every kind of kernels that a path can need: `kernel_paths`
    dummy_steps.py          times the path that a real step of these rows would take
    launches_at_once        tells the runner whether a plan may follow the step under way

    path                      steps                                                                     head
    decode graph              rows independent of one another, at most max_decode_size                  in the graph
    decode graph in parts     the same over GPUs that have some of the layers each                      in the graph
    small graph               up to SMALL_BATCH_ROWS rows, of which some read others of the step        in the graph
    drafts graph              rows of sequences with drafts, more than the small graphs take            in the graph
    prompts in parts          longer than a part, over GPUs that have some of the layers each           apart
    prompts graph             any rows whose tiles fit, of sizes with room for tiles                    apart
    eager                     all others, and every step that is observed                               apart

If a step's graph is not captured yet, its kernels are launched one by one with the sizes of its path.

Each draft is a row of decode attention that also reads the keys of the drafts before it. So a drafts graph depends on
the number of rows only, not on the number of drafts per sequence.

A step with embeddings takes the same path as one with tokens only: the embeddings are copied to their rows before the
first kernel, which does not overwrite them. If a span's rows see one another (Gemma's pictures), rows in tiles need
another attention kernel, for which no prompts graph is captured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from moeserve.models.adapters.scope import AdapterScope
from moeserve.models.step_buffers import SMALL_BATCH_ROWS
from moeserve.worker.engines.gpu.steps.expert_streaming import Streaming

MAX_PARTS = 8  # most parts of a step with prompts
DECODE_PARTS = 2
LEAST_PART_ROWS = 4 * SMALL_BATCH_ROWS  # with fewer rows a part is not faster

GraphFamily = Literal["decode", "decode parts", "small", "drafts", "prompts"]


class StepShape(NamedTuple):
    """The properties of a step that decide how it is launched: by which CUDA graph, or eagerly."""

    counts: npt.NDArray[np.int32]  # [sequences]: tokens of each; sequences with one token come first
    num_rows: int  # their sum
    has_new: bool = False  # some sequence is new, and may read rows of others in this step
    scope: AdapterScope = AdapterScope.NONE  # of the adapters that rows use
    is_observed: bool = False
    sees_ahead: bool = False  # some rows see later rows
    drafted: npt.NDArray[np.int32] | None = None  # [sequences]: how many of the tokens are drafts; None: none

    @classmethod
    def of(cls, counts: Sequence[int], drafts: Sequence[int]) -> StepShape:
        """Returns the shape of a step of old sequences. drafts: how many of each one's tokens are drafts."""
        return cls(np.array(counts, np.int32), sum(counts), drafted=np.array(drafts, np.int32))


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The properties of the engine on which paths depend, including measurements."""

    sizes: tuple[int, ...]  # step sizes in rows, ascending; steps are padded to one of them
    max_decode_size: int  # largest size of decode graphs; no step has more independent rows
    max_drafts_size: int = 0  # largest size of graphs with drafts; 0: there are none
    # By size: tiles that a prompts graph has room for. A size without an entry has no such graph.
    max_tiles: Mapping[int, int] = field(default_factory=dict)
    # tokens of a chunk per tile, for the single attention form of models with prompts graphs
    tile_tokens: int = 1
    max_graph_decode: int = 0  # rows with decode attention in a prompts graph
    scopes: tuple[AdapterScope, ...] = (AdapterScope.NONE,)  # adapter scopes that graphs are captured for
    can_stream: bool = False
    spans_see_ahead: bool = False  # see ModelShape
    takes_parts: bool = False
    streaming: Streaming = field(default_factory=Streaming)
    # By size: parts of a step with prompts. A size without an entry is not divided.
    prompt_parts: Mapping[int, int] = field(default_factory=dict)
    decode_parts: frozenset[int] = frozenset()  # sizes of decode steps that are divided into DECODE_PARTS


class GraphKey(NamedTuple):
    """Identifies a CUDA graph."""

    family: GraphFamily
    size: int
    scope: AdapterScope

    @property
    def has_head(self) -> bool:
        """True if the graph also computes the logits of all its rows."""
        return self.family != "prompts"


class KernelKind(NamedTuple):
    """The properties that select a step's kernels. Two paths with equal values launch the same kernels."""

    size: int
    has_tiles: bool
    is_independent: bool
    streamed: Literal["none", "part", "all"]
    scope: AdapterScope
    sees_ahead: bool = False


class StepPath(NamedTuple):
    size: int  # rows, padded
    num_decode: int  # first rows, which use decode attention
    has_tiles: bool  # the other rows use prefill attention, in tiles
    is_independent: bool = False  # no row reads the KV of another row of this step
    streamed: float = 0.0  # fraction of the RAM experts streamed to the GPU
    scope: AdapterScope = AdapterScope.NONE
    graph: GraphKey | None = None
    part_rows: int = 0  # rows per part; 0: not divided
    sees_ahead: bool = False  # rows in tiles see later rows

    @property
    def kernels(self) -> KernelKind:
        streamed: Literal["none", "part", "all"] = "part"
        if self.streamed in (0.0, 1.0):
            streamed = "all" if self.streamed else "none"
        return KernelKind(
            self.size, self.has_tiles, self.is_independent, streamed, self.scope, self.sees_ahead
        )

    @property
    def launches_at_once(self) -> bool:
        """True if launching takes the host much less time than the step takes the GPU."""
        return self.graph is not None


def path_of(step: StepShape, facts: StepFacts) -> StepPath:
    """Returns the path of a step. Raises ValueError for more rows than the largest size."""
    path = _eager(step, facts)
    if step.is_observed:
        return path
    if not path.has_tiles and (family := _graph_with_head(step, path, facts)) is not None:
        part_rows = path.size // DECODE_PARTS if family == "decode parts" else 0
        return path._replace(graph=GraphKey(family, path.size, path.scope), part_rows=part_rows)
    part_rows = path.size // facts.prompt_parts.get(path.size, 1)
    if step.num_rows > part_rows and not path.scope:
        return path._replace(part_rows=part_rows)
    if _fits_prompts_graph(step, path, facts):
        return path._replace(graph=GraphKey("prompts", path.size, path.scope))
    return path


def path_of_part(counts: npt.NDArray[np.int32], num_rows: int, facts: StepFacts) -> StepPath:
    """Returns the path of one part of a divided prompt step: it runs eagerly, like a step of these rows. counts: int32
    [sequences], tokens of each sequence in the part; num_rows: their sum."""
    return _eager(StepShape(counts, num_rows), facts)._replace(is_independent=False, streamed=0.0)


def _eager(step: StepShape, facts: StepFacts) -> StepPath:
    n = step.num_rows
    alone = rows_alone(step.counts, n, step.drafted)
    has_tiles = alone < n
    return StepPath(
        padded_size(n, facts.sizes),
        alone,
        has_tiles,
        is_independent=n == 1 or (n == len(step.counts) and not step.has_new),
        streamed=facts.streaming.part(n) if has_tiles else 0.0,
        scope=step.scope,
        sees_ahead=has_tiles and step.sees_ahead,
    )


def _graph_with_head(step: StepShape, path: StepPath, facts: StepFacts) -> GraphFamily | None:
    if path.is_independent:
        is_longer = step.num_rows > path.size // DECODE_PARTS
        if path.size in facts.decode_parts and is_longer and not path.scope:
            return "decode parts"
        return "decode" if path.size <= facts.max_decode_size else None
    if path.size <= SMALL_BATCH_ROWS:
        return "small"
    return "drafts" if path.size <= facts.max_drafts_size else None


def _fits_prompts_graph(step: StepShape, path: StepPath, facts: StepFacts) -> bool:
    room = facts.max_tiles.get(path.size, 0)
    if not room or path.num_decode > facts.max_graph_decode or path.sees_ahead:
        return False
    if not path.has_tiles:
        return True
    chunks = step.counts[sequences_alone(step.counts, path.num_decode) :]
    return int((-(-chunks // facts.tile_tokens)).sum()) <= room


def padded_size(n: int, sizes: Sequence[int]) -> int:
    """Returns the smallest of `sizes` (ascending) that is at least n."""
    for size in sizes:
        if size >= n:
            return size
    raise ValueError(f"a step of {n} rows, and the largest size is {sizes[-1]}")


def rows_alone(
    counts: npt.NDArray[np.int32], num_rows: int, drafted: npt.NDArray[np.int32] | None = None
) -> int:
    """Returns how many of the first rows use decode attention: each sequence's last token and its drafts. In steps of
    at most SMALL_BATCH_ROWS rows all do, chunks included: only decode attention writes the format that the small-batch
    products read. counts, drafted: int32 [sequences], tokens of each and the drafts among them."""
    if num_rows <= SMALL_BATCH_ROWS or num_rows == len(counts):
        return num_rows
    is_chunk = counts > 1 if drafted is None else counts - drafted > 1
    if not is_chunk.any():
        return num_rows
    return int(counts[: np.argmax(is_chunk)].sum())


def sequences_alone(counts: npt.NDArray[np.int32], num_decode: int) -> int:
    """Returns how many of the first sequences the first `num_decode` rows belong to; fewer than rows if some are
    drafts. counts: int32 [sequences], tokens of each."""
    return int(np.searchsorted(np.cumsum(counts), num_decode, side="right"))


# ---------------------------------------------------------------- before the first step


def graph_keys(facts: StepFacts) -> Iterator[GraphKey]:
    """Yields the keys of all graphs of whole steps, in the order of capturing."""
    for size in reversed(facts.sizes):
        for scope in facts.scopes:
            if size <= facts.max_decode_size:
                yield GraphKey("decode", size, scope)
            if 1 < size <= SMALL_BATCH_ROWS:
                yield GraphKey("small", size, scope)
            elif 1 < size <= facts.max_drafts_size:
                yield GraphKey("drafts", size, scope)
    for size, tiles in facts.max_tiles.items():
        if tiles:
            yield from (GraphKey("prompts", size, scope) for scope in facts.scopes)


def captured_path(graph: GraphKey, facts: StepFacts) -> StepPath:
    """Returns the path that a graph is captured with: the maximal rows of any step of its size."""
    is_prompts = graph.family == "prompts"
    return StepPath(
        graph.size,
        min(graph.size, facts.max_graph_decode) if is_prompts else graph.size,
        has_tiles=is_prompts,
        is_independent=graph.family == "decode",
        scope=graph.scope,
        graph=graph,
    )


def kernel_paths(size: int, facts: StepFacts) -> Iterator[StepPath]:
    """Yields one path per `KernelKind` that steps of this size can have."""
    for scope in facts.scopes:
        for is_independent in (True, False):
            yield StepPath(size, size, has_tiles=False, is_independent=is_independent, scope=scope)
        if size > SMALL_BATCH_ROWS:
            for streamed in (0.0, 0.5, 1.0) if facts.can_stream else (0.0,):
                for ahead in (False, True) if facts.spans_see_ahead else (False,):
                    yield StepPath(size, 0, has_tiles=True, streamed=streamed, scope=scope, sees_ahead=ahead)


def decode_sizes_in_parts(facts: StepFacts) -> list[int]:
    """Returns the sizes of decode steps that are worth dividing."""
    return [size for size in facts.sizes if LEAST_PART_ROWS * DECODE_PARTS <= size <= facts.max_decode_size]


def part_choices(size: int) -> list[int]:
    """Returns the numbers of parts into which a prompt step of this size may be divided."""
    most = min(MAX_PARTS, size // LEAST_PART_ROWS)
    return [1 << e for e in range(most.bit_length())] if most else [1]
