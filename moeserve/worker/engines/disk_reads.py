"""Gathers the failures and counts of a worker's reads from disk: of experts, and of rows of a table of n-gram
embeddings."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

from moeserve.kernels import _C
from moeserve.messages.expert_disk import ExpertDiskCounts
from moeserve.messages.table_rows import TableRowCounts
from moeserve.models.loading.ngram_rows import NgramRows
from moeserve.worker.sequences import Sequences, StepLayout

from .disk_experts import DiskExperts
from .wrong_slots import WrongSlots


class StepEnd(NamedTuple):
    """The failed rows and the counts that a step with weights on disk adds to its result."""

    failed_rows: dict[int, str]
    experts: ExpertDiskCounts | None  # since the step before; None: all experts are in memory
    table: TableRowCounts | None  # since the step before; None: no table on disk


class DiskReads(NamedTuple):
    experts: DiskExperts | None  # None: all experts are in memory
    table: NgramRows | None  # None: the model has none, or another part of the worker reads it
    wrong: WrongSlots

    @classmethod
    def of(
        cls, native: _C.DiskExperts | None, table: NgramRows | None, num_kv_slots: int, num_state_slots: int
    ) -> DiskReads | None:
        """Returns None if nothing is read from disk. native: experts on disk."""
        if native is None and table is None:
            return None
        experts = None if native is None else DiskExperts(native)
        return cls(experts, table, WrongSlots(num_kv_slots, num_state_slots))

    def end_step(self, layout: StepLayout, sequences: Sequences, *, is_followed: bool) -> StepEnd:
        """Returns the step's failed rows and counts. Call it when the whole step is computed. is_followed: the next
        one is launched."""
        found = chain(
            () if self.experts is None else self.experts.take_failures(),
            () if self.table is None else self.table.take_failures(is_followed=is_followed),
        )
        return StepEnd(
            self.wrong.end_step(layout, sequences, found),
            None if self.experts is None else self.experts.end_step(),
            None if self.table is None else TableRowCounts(*self.table.take_counts()),
        )
