"""Micro-batches for pipeline parallelism: if each GPU has some of the layers, a step is divided into parts, and a
GPU computes the next part while the following GPU computes the current one.

A part is a run of consecutive rows of the step. Each part has its own inputs, because several parts are in progress at
once; the head reads the inputs of the whole step. The best number of parts is measured at start-up
(`engines/gpu/measure/parts.py`): each part reads the weights again, but with few parts the GPUs wait for each other.
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
from moeserve.worker.engines.gpu.steps.cuda_graphs import CudaGraphs, Launches
from moeserve.worker.engines.gpu.steps.prompt_tiles import tiles_on
from moeserve.worker.engines.gpu.steps.step_inputs import StepInputs
from moeserve.worker.engines.gpu.steps.step_path import DECODE_PARTS, StepFacts, StepPath, path_of_part
from moeserve.worker.sequences import Int32s, Sequences, StepLayout

TilesOf = Callable[[Int32s, Int32s, Int32s, Int32s], list[Int32s]]


class DummyPart(NamedTuple):
    rows: int
    start: int  # index of the first row in the step


class MicroBatches:
    """Runs the steps of one engine that are divided into parts (`step_path.py`)."""

    def __init__(
        self,
        model: GpuDecoder,
        inputs: Mapping[int, StepInputs],
        make_inputs: Callable[[int], StepInputs],
        tiles_of: TilesOf,
        dummy_slot: int,
        facts: StepFacts,
    ) -> None:
        """inputs: of whole steps, by size. make_inputs: creates inputs of a size. tiles_of: tiles of prompt chunks,
        see `GpuEngine`."""
        self._model = model
        self._whole = inputs
        self._make_inputs = make_inputs
        self._tiles_of = tiles_of
        self._dummy_slot = dummy_slot
        self._facts = facts
        self._own: dict[tuple[int, int], StepInputs] = {}  # by (size, number of the part)
        self._logits: dict[int, Tensor] = {}
        # CUDA graphs of divided decode steps, by the whole step's size
        self._decode: dict[int, Launches] = {}

    # ---------------------------------------------------------------- decode steps

    def capture(self, sizes: Sequence[int], logits: dict[int, Tensor]) -> None:
        """Captures CUDA graphs of the divided decode steps with these numbers of rows, including the head, which writes
        to logits[size]. Every rank must call it with the sizes in the same order."""
        self._logits = logits
        graphs = CudaGraphs(self._model.device)
        for size in sizes:
            copies = partial(self._copy_decode, size)
            replay = graphs.capture(partial(self._launch_decode, size), copies)
            self._decode[size] = partial(_after, copies, replay)

    def decode(self, path: StepPath, layout: StepLayout, sequences: Sequences) -> Launches:
        """Returns functions that run a divided decode step and its head. The whole step's inputs must be copied
        before."""
        for number, part in enumerate(split(layout.rows, path.part_rows)):
            self._inputs_of(path.part_rows, number).fill(part, sequences)
        return self._decode[path.size]

    def dummy_decode(self, path: StepPath, vocab: int) -> Launches:
        """Returns functions that run a divided decode step of dummy rows."""
        for number in range(DECODE_PARTS):
            self._inputs_of(path.part_rows, number).fill_dummy(path.part_rows, vocab, is_prompt=False)
        return self._decode[path.size]

    def _copy_decode(self, size: int) -> None:
        for number in range(DECODE_PARTS):
            self._inputs_of(size // DECODE_PARTS, number).copy()

    def _launch_decode(self, size: int) -> None:
        half, whole = size // DECODE_PARTS, self._whole[size]
        for number in range(DECODE_PARTS):
            batch = self._inputs_of(half, number).batch(_decode_part(half))
            self._model.forward(batch, part=StepPart(number * half, number == DECODE_PARTS - 1))
        if self._model.has_head:
            rows, _, count = whole.head(0, size)
            self._logits[size] = self._model.logits(size, rows, count)

    # ---------------------------------------------------------------- steps with prompts

    def run_prompts(self, path: StepPath, layout: StepLayout, sequences: Sequences) -> None:
        """Launches a divided step with prompts, whose whole inputs are filled."""
        self._whole[path.size].copy()
        parts = split(layout.rows, path.part_rows)
        for number, part in enumerate(parts):
            own_path = path_of_part(part.count, part.n, self._facts)
            own = self._inputs_of(own_path.size, number)
            own.fill(part, sequences)
            tiles = None
            if own_path.has_tiles:
                fields = (part.offset, part.count, part.start, part.req_slot)
                tiles = self._tiles_of(*(field[own_path.num_decode :] for field in fields))
            self._launch(own, own_path, tiles, StepPart(number * path.part_rows, number == len(parts) - 1))

    def dummy_prompt(self, n: int, start: int, part_rows: int) -> Launches:
        """Returns functions that launch a dummy prompt of n random tokens from position `start` on, in parts of
        `part_rows` rows."""
        dummies = [DummyPart(min(part_rows, n - begin), start + begin) for begin in range(0, n, part_rows)]

        def launch() -> None:
            for number, dummy in enumerate(dummies):
                zero, count, at = (np.array([each], np.int32) for each in (0, dummy.rows, dummy.start))
                path = path_of_part(count, dummy.rows, self._facts)
                own = self._inputs_of(path.size, number)
                own.fill_dummy(dummy.rows, self._model.shape.vocab_size, dummy.start)
                tiles = self._tiles_of(zero, count, at, zero + self._dummy_slot) if path.has_tiles else None
                self._launch(own, path, tiles, StepPart(number * part_rows, number == len(dummies) - 1))

        return launch

    def _launch(self, inputs: StepInputs, path: StepPath, tiles: list[Int32s] | None, part: StepPart) -> None:
        if path.has_tiles:
            inputs.fill_decode_rows(path.num_decode)
        inputs.copy()
        batch = inputs.batch(path, None if tiles is None else tiles_on(self._model.device, tiles))
        self._model.begin(batch)
        self._model.forward(batch, part=part)

    def _inputs_of(self, size: int, number: int) -> StepInputs:
        if (size, number) not in self._own:
            self._own[size, number] = self._make_inputs(size)
        return self._own[size, number]


def _decode_part(rows: int) -> StepPath:
    return StepPath(rows, rows, has_tiles=False, is_independent=True)


def split(rows: Sequence[Row], at_most: int) -> list[StepLayout]:
    """Returns a step's rows divided into parts of exactly `at_most` tokens (the last may have fewer); prompt chunks may
    be split."""
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
    """Splits a row after `count` tokens."""
    replace = msgspec.structs.replace
    cut = 4 * count  # bytes of `count` int32 slots
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
