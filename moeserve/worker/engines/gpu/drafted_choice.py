"""Samples tokens at drafted positions on a GPU: all at once if each depends only on its logits and its output index;
else one position after another, and the host waits for each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from moeserve.messages.sampling import TokenLogprob
from moeserve.models.blocks.gpu.decoder import GpuDecoder
from moeserve.worker.engines.engine import SampledAtOnce, TokenMasks
from moeserve.worker.engines.gpu.sampler import GpuSampler
from moeserve.worker.engines.gpu.steps.pinned import pinned_copy
from moeserve.worker.engines.gpu.steps.step_columns import ALIGN
from moeserve.worker.engines.gpu.steps.step_path import padded_size
from moeserve.worker.engines.gpu.token_choice import LogitRows, TokenChoice
from moeserve.worker.sequences import Int32s, StepLayout, first_drafts


class DraftedChoice:
    """Implements the sampling of `DraftingEngine`."""

    def __init__(
        self, model: GpuDecoder, sampler: GpuSampler, choice: TokenChoice, most_requests: int
    ) -> None:
        """most_requests: of a step."""
        self._model = model
        self._sampler = sampler
        self._choice = choice
        self._most_requests = most_requests
        # Slots of the states that accepted drafts change, their first drafts and how many; None: none.
        self._accepted: tuple[Int32s, Int32s, Int32s] | None = None

    def logits(self, size: int, rows: Int32s) -> Tensor:
        """Launches the head for these rows of the last step, which had this padded size. Returns float32 [len(rows),
        vocab]."""
        count, of_rows = self._bring(rows, width=padded_size(len(rows), self._model.head_sizes))
        return self._model.logits(size, of_rows, count[:1])[: len(rows)]

    def sample_from(
        self, logits: Tensor, slots: Int32s, masks: TokenMasks | None
    ) -> tuple[Int32s, list[TokenLogprob | None]]:
        """Samples one token for each row of `logits` (float32 [rows, vocab]). slots: int32 [rows], the rows' request
        slots. Waits; returns the tokens, int32 [rows], and the log-probabilities that requests ask for."""
        count, on_device = self._bring(slots)
        self._choice.launch(_aligned(logits, on_device, count), slots, masks)
        return self._choice.read()

    def sample_at_once(
        self, logits: Tensor, slots: Int32s, ahead: Int32s
    ) -> Callable[[], SampledAtOnce] | None:
        """Launches the sampling of all rows of `logits` (float32 [rows, vocab]) together, and returns what waits for
        the tokens; None if a request's sampling depends on its earlier tokens, as with penalties. slots, ahead: as in
        `RunSampler`."""
        if self._sampler.depends_on_outputs(slots):
            return None
        count, on_device, number = self._bring(slots, ahead)
        self._choice.launch_ahead(_aligned(logits, on_device, count), slots, number)
        return lambda: SampledAtOnce(*self._choice.read(), self._sampler.note_outputs)

    def commit_states(self, layout: StepLayout, slots: Int32s, accepted: Int32s) -> None:
        """Notes that accepted drafts change recurrent states, for `settle`. slots: int32 [sequences], their state
        slots; accepted: int32 [sequences], number of accepted drafts. Until then these slots have the states without
        the drafts, so that whoever reads or loads a slot must settle first."""
        assert layout.drafted is not None
        moved = accepted > 0
        self._accepted = slots[moved], first_drafts(layout.drafted)[moved], accepted[moved]

    def settle(self) -> None:
        """Launches the changes of states that were noted. Call it before these are read or copied."""
        if self._accepted is not None:
            moved, self._accepted = self._accepted, None
            self._commit(*moved)

    def _commit(self, slots: Int32s, first: Int32s, accepted: Int32s) -> None:
        # of one width, because the kernel is compiled for it
        moved = self._bring(slots, first, accepted, width=self._most_requests)
        self._model.commit_states(moved[1:], len(slots))

    def launch_all_kernels(self) -> None:
        """Launches the kernels that only steps with drafts need. Must be called inside `compile_ahead`, where launches
        only compile and nothing is executed."""
        if self._model.has_state_drafts:
            self._commit(*np.zeros((3, 1), np.int32))

    def _bring(self, *columns: Int32s, width: int = 0) -> Tensor:
        """Uploads columns: int32 [1 + columns, width or more]: their length, then the columns, each at an aligned
        address."""
        n = len(columns[0])
        brought = np.zeros((1 + len(columns), -(-max(n, width) // ALIGN) * ALIGN), np.int32)
        brought[0, 0] = n
        for row, column in zip(brought[1:], columns, strict=True):
            row[:n] = column
        return pinned_copy(brought, self._model.device)


def _aligned(logits: Tensor, slots: Tensor, count: Tensor) -> LogitRows:
    """Copies rows to aligned addresses, for which the kernels are compiled, if they are not aligned."""
    aligned = logits if logits.data_ptr() % 16 == 0 else logits.clone()
    return LogitRows(aligned, slots, count[:1])
