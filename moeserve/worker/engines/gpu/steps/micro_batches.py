"""Steps in parts, where each GPU has some of the layers: while one computes a part, the one before computes the next.

A part is some rows of the step in order. Each has inputs of its own, because several are on their way at once; the
head reads the whole step's. The number of parts is measured at the start (`engines/gpu/measure/parts.py`): each
part reads the weights anew, and with few parts the GPUs wait for one another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
from torch import Tensor

from moeserve.messages.steps import Row
from moeserve.models.blocks.gpu.decoder import GpuDecoder
from moeserve.models.blocks.gpu.stage import StepPart
from moeserve.models.step_buffers import SMALL_BATCH_ROWS
from moeserve.worker.engines.gpu.steps.cuda_graphs import CudaGraphRecorder, Launches
from moeserve.worker.engines.gpu.steps.prompt_tiles import tiles_on
from moeserve.worker.engines.gpu.steps.row_counts import leading_ones, rounded
from moeserve.worker.engines.gpu.steps.step_inputs import StepInputs
from moeserve.worker.sequences import Int32s, Sequences, StepLayout

MAX_PARTS = 8
DECODE_PARTS = 2
LEAST_ROWS = 4 * SMALL_BATCH_ROWS  # of a part: fewer take as long as one

TilesOf = Callable[[Int32s, Int32s, Int32s, Int32s], list[Int32s]]


class DummyPart(NamedTuple):
    rows: int
    start: int  # position of the first


class MicroBatches:
    """Of one engine. `parts` says into how many parts a step of each size goes; 1, or no entry: it is whole."""

    def __init__(
        self,
        model: GpuDecoder,
        inputs: Mapping[int, StepInputs],
        make_inputs: Callable[[int], StepInputs],
        tiles_of: TilesOf,
        nobody: int,
    ) -> None:
        """inputs: of whole steps, by size; make_inputs: more of a size; tiles_of: of chunks, see `GpuEngine`."""
        self._model = model
        self._whole = inputs
        self._make_inputs = make_inputs
        self._tiles_of = tiles_of
        self._nobody = nobody
        self._own: dict[tuple[int, int], StepInputs] = {}  # by size and the part's number
        self._logits: dict[int, Tensor] = {}
        self._decode: dict[int, Launches] = {}  # recorded steps in DECODE_PARTS, by the whole step's size
        # Of steps with prompts; two until it is measured.
        self.parts = {size: self.choices(size)[:2][-1] for size in inputs if size > SMALL_BATCH_ROWS}
        self.decode_parts: set[int] = set()  # sizes of decode steps that go in DECODE_PARTS: all, until then

    def choices(self, size: int) -> list[int]:
        """Into how many parts a step of this size with prompts may go."""
        most = min(MAX_PARTS, size // LEAST_ROWS)
        return [1 << e for e in range(most.bit_length())] if most else [1]

    # ---------------------------------------------------------------- decode steps

    def record(self, sizes: Sequence[int], logits: dict[int, Tensor]) -> None:
        """The decode steps of these sizes in parts, with the head, which leaves its result in `logits`. On every rank,
        in the same order."""
        self._logits = logits
        recorder = CudaGraphRecorder(self._model.device)
        for size in sizes:
            if size // DECODE_PARTS >= LEAST_ROWS:
                copies = partial(self._copy_decode, size)
                replay = recorder.record(partial(self._launch_decode, size), copies)
                self._decode[size] = partial(_after, copies, replay)
        self.decode_parts = set(self._decode)

    @property
    def decode_sizes(self) -> list[int]:
        return list(self._decode)

    def decode(self, size: int, layout: StepLayout, sequences: Sequences) -> Launches | None:
        """What runs the step, whose rows are independent of one another, and its head; None: it is not to go in parts.
        The whole step's inputs are copied before."""
        half = size // DECODE_PARTS
        if size not in self.decode_parts or layout.n <= half:
            return None
        for number, part in enumerate(split(layout.rows, half)):
            self._inputs_of(half, number).fill(part, sequences)
        return self._decode[size]

    def dummy_decode(self, size: int, vocab: int) -> Launches:
        """The same of a step of `size` rows that belong to nobody."""
        half = size // DECODE_PARTS
        for number in range(DECODE_PARTS):
            self._inputs_of(half, number).fill_dummy(half, vocab, is_prompt=False)
        return self._decode[size]

    def _copy_decode(self, size: int) -> None:
        for number in range(DECODE_PARTS):
            self._inputs_of(size // DECODE_PARTS, number).copy()

    def _launch_decode(self, size: int) -> None:
        half, whole = size // DECODE_PARTS, self._whole[size]
        for number in range(DECODE_PARTS):
            batch = self._inputs_of(half, number).batch(half, None, 0.0, rows_independent=True)
            self._model.forward(batch, part=StepPart(number * half, number == DECODE_PARTS - 1))
        if self._model.has_head:
            rows, _, count = whole.head(0, size)
            self._logits[size] = self._model.logits(size, rows, count)

    # ---------------------------------------------------------------- steps with prompts

    def run_prompts(self, size: int, layout: StepLayout, sequences: Sequences) -> bool:
        """Whether the step goes in parts, which then are launched. The whole step's inputs have been filled."""
        part_rows = size // self.parts.get(size, 1)
        if layout.n <= part_rows:
            return False
        self._whole[size].copy()
        parts = split(layout.rows, part_rows)
        for number, part in enumerate(parts):
            own = self._inputs_of(rounded(part.n, self._model.sizes), number)
            own.fill(part, sequences)
            num_decode = rows_alone(part)
            behind = slice(num_decode, None)
            tiles = None
            if num_decode < part.n:
                fields = (part.offset, part.count, part.start, part.req_slot)
                tiles = self._tiles_of(*(field[behind] for field in fields))
            self._launch(own, num_decode, tiles, StepPart(number * part_rows, number == len(parts) - 1))
        return True

    def dummy_prompt(self, n: int, start: int, parts: int) -> Launches:
        """What launches a step of n random tokens of a prompt of nobody, from position `start` on, in so many parts."""
        size = rounded(n, self._model.sizes)
        part_rows = size // parts
        begins = range(0, n, part_rows)
        dummies = [DummyPart(min(part_rows, n - begin), start + begin) for begin in begins]

        def launch() -> None:
            for number, dummy in enumerate(dummies):
                own = self._inputs_of(rounded(dummy.rows, self._model.sizes), number)
                own.fill_dummy(dummy.rows, self._model.shape.vocab_size, dummy.start)
                zero, count, at = (np.array([each], np.int32) for each in (0, dummy.rows, dummy.start))
                part = StepPart(number * part_rows, number == len(dummies) - 1)
                if dummy.rows <= SMALL_BATCH_ROWS:
                    self._launch(own, dummy.rows, None, part)
                else:
                    self._launch(own, 0, self._tiles_of(zero, count, at, zero + self._nobody), part)

        return launch

    def _launch(
        self, inputs: StepInputs, num_decode: int, tiles: list[Int32s] | None, part: StepPart
    ) -> None:
        inputs.copy()
        on_device = None if tiles is None else tiles_on(self._model.device, tiles)
        batch = inputs.batch(num_decode, on_device, 0.0)
        self._model.begin(batch)
        self._model.forward(batch, part=part)

    def _inputs_of(self, size: int, number: int) -> StepInputs:
        if (size, number) not in self._own:
            self._own[size, number] = self._make_inputs(size)
        return self._own[size, number]


def rows_alone(part: StepLayout) -> int:
    """How many of its first rows attend each by itself. Of few rows all do, those of a chunk too, as in a step of their
    own: only that attention leaves what the products of few rows read."""
    if part.n <= SMALL_BATCH_ROWS or part.n == len(part.count):
        return part.n
    return leading_ones(part.count)


def split(rows: Sequence[Row], at_most: int) -> list[StepLayout]:
    """A step's rows in parts of exactly so many tokens each, but for the last; a chunk may be divided."""
    parts: list[list[Row]] = [[]]
    room = at_most
    for row in rows:
        rest = row
        while rest.count > room:
            if room:
                begin, rest = _divide(rest, room)
                parts[-1].append(begin)
            parts.append([])
            room = at_most
        parts[-1].append(rest)
        room -= rest.count
    return [StepLayout(part) for part in parts if part]


def _divide(row: Row, count: int) -> tuple[Row, Row]:
    """Its first `count` tokens, and the others."""
    replace = msgspec.structs.replace
    cut = 4 * count  # bytes of int32 slots
    first = replace(
        row, count=count, kv_slots=row.kv_slots[:cut], window_slots=row.window_slots[:cut], sample=False
    )
    rest = replace(
        row,
        start=row.start + count,
        count=row.count - count,
        kv_slots=row.kv_slots[cut:],
        window_slots=row.window_slots[cut:],
    )
    return first, rest


def _after(first: Launches, then: Launches) -> None:
    first()
    then()
