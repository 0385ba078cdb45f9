"""Rows that may have drafts: from what the router grants to positions, tokens and KV slots."""

from __future__ import annotations

import time

import numpy as np

from moeserve.messages.steps import CONTINUES, NewSeq, Row
from moeserve.worker.drafts.drafter import Drafter, Wanted
from moeserve.worker.sequences import Int32s, Sequences, StepLayout


class DraftRows:
    """How far each request is, which the router does not know in time. One writer: the runner.

    Positions below `granted` have KV slots. `length` tokens are known: the last of them is the first input of the next
    row, all before are computed."""

    def __init__(self, sequences: Sequences, drafter: Drafter) -> None:
        self._sequences = sequences
        self._drafter = drafter
        num_slots = len(sequences.num_prompt)
        self._granted = [0] * num_slots
        self.length = [0] * num_slots
        self.stop_ids: list[frozenset[int]] = [frozenset()] * num_slots
        self.draft_ms = 0.0  # that the last `place` took to draft

    def bind(self, seq: NewSeq) -> None:
        """The request is about to take its slot. Rows without drafts compute all tokens that are known, before the
        first that may have some."""
        slot = seq.req_slot
        self._granted[slot] = self.length[slot] = len(seq.token_ids) // 4
        self.stop_ids[slot] = frozenset(seq.sampling.stop_token_ids)
        self._drafter.bind(slot, seq.namespace)

    def place(self, rows: list[Row], *, is_awaited: bool = False) -> tuple[list[Row], list[int]]:
        """The rows where they are to be computed, and the drafts of each, whose tokens are in the request's table
        then. is_awaited: the last tokens are still being sampled; then no row may have drafts."""
        continuing = [at for at, row in enumerate(rows) if row.start == CONTINUES]
        placed, drafted = list(rows), [0] * len(rows)
        wanted = [self._grant(rows[at]) for at in continuing]
        if is_awaited:
            wanted = [Wanted(one.slot, one.length - 1, 0) for one in wanted]
        if any(one.most > 0 for one in wanted):
            self._drafter.catch_up()  # which is owed, drafts or not
        began = time.perf_counter()
        drafts = self._drafter.draft(wanted)
        self.draft_ms = (time.perf_counter() - began) * 1e3
        for at, draft in zip(continuing, drafts, strict=True):
            placed[at], drafted[at] = self._place(rows[at], draft)
        return placed, drafted

    def computed(self, layout: StepLayout, accepted: Int32s) -> None:
        """A step of these rows has been sampled. accepted: int32 [rows], drafts of each that were right."""
        self._drafter.computed(layout, accepted)

    def _grant(self, row: Row) -> Wanted:
        slot, sequences = row.req_slot, self._sequences
        granted = self._granted[slot]
        self._granted[slot] = end = granted + len(row.kv_slots) // 4
        sequences.kv_slots[slot, granted:end] = np.frombuffer(row.kv_slots, np.int32)
        if sequences.has_window_slots:
            sequences.window_slots[slot, granted:end] = np.frombuffer(row.window_slots, np.int32)
        length = self.length[slot]
        # A request that has ended has one more row at most: its state must stay as it is, as a snapshot.
        has_ended = int(sequences.tokens[slot, length - 1]) in self.stop_ids[slot]
        return Wanted(slot, length, 0 if has_ended else row.count - 1)

    def _place(self, row: Row, draft: Int32s) -> tuple[Row, int]:
        slot, sequences = row.req_slot, self._sequences
        length = self.length[slot]
        is_span = draft < 0  # what followed the same tokens before was a picture, say
        if is_span.any():
            draft = draft[: int(is_span.argmax())]
        num = len(draft)
        sequences.tokens[slot, length : length + num] = draft
        start, stop = length - 1, length + num
        windows = b""
        if sequences.has_window_slots:
            windows = sequences.window_slots[slot, start:stop].tobytes()
        kv_slots = sequences.kv_slots[slot, start:stop].tobytes()
        return Row(slot, start, 1 + num, kv_slots, True, windows), num

    def grew(self, slots: Int32s) -> None:
        """Each of these requests has one more token."""
        for slot in slots.tolist():
            self.length[slot] += 1
