"""A step's embeddings as engines need them: which rows are embeddings, the rows' RoPE positions, and how many positions
each row sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moeserve.messages.steps import NewSeq
from moeserve.models.interface import ModelShape
from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.worker.engines.embedding_rows import EmbeddingRows, StepSpan
from moeserve.worker.engines.rotary_positions import RotaryPositions
from moeserve.worker.sequences import Int32s, StepLayout


class EmbeddedStep(NamedTuple):
    """A step's embeddings, and the positions that differ because of them."""

    spans: Sequence[StepSpan]  # the rows that are embeddings
    rotary_positions: Int32s  # int32 [n], or [3, n] by section
    ends: Int32s | None  # int32 [n]: positions that each row sees; None: each sees itself and all before it
    # Like rotary_positions, of the first token of each row's block of keys, for an indexer of blocks; None: without
    # one, or as rotary_positions are layout.position
    first_positions: Int32s | None = None
    # Like rotary_positions, of the token before each row's, where a next-token block's row is; None: position - 1
    before_positions: Int32s | None = None

    @classmethod
    def of_tokens(cls, layout: StepLayout) -> EmbeddedStep:
        """Returns the EmbeddedStep of a step whose requests have tokens only."""
        return cls((), layout.position, None)

    @property
    def rows(self) -> list[tuple[int, Tensor]]:
        """The first row of each span, and its embeddings: float32 [count, `ModelShape.embedding_size`]."""
        return [(span.first, torch.from_numpy(span.rows)) for span in self.spans]


class RequestEmbeddings:
    """The embeddings of all request slots. Owned by the runner."""

    def __init__(self, files: EmbeddingFiles, shape: ModelShape) -> None:
        self._rows = EmbeddingRows(files, shape.embedding_size)
        self._rotary = None if shape.rope_sections is None else RotaryPositions()
        self._see_ahead = shape.spans_see_ahead
        self._block = 0 if shape.indexer is None else shape.indexer.rule.block
        self._has_block = shape.next_token_layer is not None

    @property
    def rotary(self) -> RotaryPositions | None:
        """The RoPE positions of pictures; None for a model whose tokens have one position each."""
        return self._rotary

    def bind(self, seq: NewSeq) -> None:
        """Initialises a request slot."""
        self._rows.bind(seq.req_slot, seq.spans)
        if self._rotary is not None:
            self._rotary.bind(seq.req_slot, seq.spans)

    def of_step(self, layout: StepLayout) -> EmbeddedStep:
        """Reads the embeddings of the step's rows from their files, and returns them with the rows' positions. Call it
        once per step, in order. Raises OSError and ValueError if a file differs from the plan, and ValueError if the
        step ends within a span that must be computed in one step."""
        found = self._rows.of_step(layout)
        positions = layout.position if self._rotary is None else self._rotary.of_step(layout)
        ends = EmbeddingRows.ends(found, layout.position) if self._see_ahead else None
        firsts = None
        if self._block and self._rotary is not None and positions is not layout.position:
            firsts = self._rotary.at(layout, layout.position // self._block * self._block)
        before = None
        if self._has_block and self._rotary is not None and positions is not layout.position:
            before = self._rotary.at(layout, layout.position - 1)
        return EmbeddedStep(found, positions, ends, firsts, before)
