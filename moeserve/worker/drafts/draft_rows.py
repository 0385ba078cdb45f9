"""Completes rows that may have drafts: computes their positions, tokens and KV slots from what the router granted."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from moeserve.messages.steps import CONTINUES, NewSeq, Row
from moeserve.worker.drafts.drafter import NO_DRAFT, Drafter, LateDrafts, PendingTokens, Reading, Wanted
from moeserve.worker.drafts.spent_time import SpentTime
from moeserve.worker.engines.keeping import Keeping
from moeserve.worker.sequences import Int32s, Sequences, StepLayout


class DraftRows:
    """The progress of each request, which the router knows only later. Owned by the runner.

    Positions below `granted` have KV slots. `length` tokens are known; the last one is the first input of the next
    row, and all before it are computed.
    """

    def __init__(
        self,
        sequences: Sequences,
        drafter: Drafter,
        reading: Reading,
        most: int | None = None,
        late: LateDrafts | None = None,
        keeping: Keeping | None = None,
        *,
        on_gpu: bool = False,
    ) -> None:
        """reading: the drafter's record of the texts that it reads. most: the most drafts of a step; None: as many as
        the router grants. late: the drafter's notes of drafts that it is still computing; None: it never is. keeping:
        its notes of what it spends without drafts; None: nothing. on_gpu: a GPU may draft, for which the host waits."""
        self._sequences = sequences
        self._drafter = drafter
        self._reading = reading
        self._reading.on_gpu = on_gpu  # its time is subtracted from the whole: the same clock
        self._most = most
        self._late = LateDrafts() if late is None else late
        self._keeping = Keeping() if keeping is None else keeping
        self._num_late = 0  # placeholders
        self._is_granted = False  # whether `launch_ahead` has taken the KV slots of the next rows
        # Request slots with tokens that the drafter was not told of, in steps in which nothing may be drafted: it then
        # costs them nothing.
        self._untold: set[int] = set()
        num_slots = len(sequences.num_prompt)
        self._granted = [0] * num_slots
        self.length = [0] * num_slots
        self.stop_ids: list[frozenset[int]] = [frozenset()] * num_slots
        # Of the last `place`: whether drafts, asked for in this step or verified in the one before, let the step wait
        # for the tokens before it; milliseconds of drafting, and of reading texts before it; rows that are not read.
        self.has_waited = False
        self.draft_ms = self.read_ms = 0.0
        self.lagging_rows: list[int] = []
        self._told_ms = 0.0  # that `bind` took for untold tokens, as a part of the next `place`'s draft_ms

    def bind(self, seq: NewSeq) -> None:
        """Initialises a request slot. Rows without drafts first compute all known tokens; rows with drafts follow."""
        if self._untold:  # the new request's drafts may come from these texts
            self._draft([Wanted(slot, self.length[slot], 0) for slot in self._untold])
            self._told_ms += self.draft_ms
            self._untold.clear()
        slot = seq.req_slot
        self._granted[slot] = self.length[slot] = len(seq.token_ids) // 4
        self.stop_ids[slot] = frozenset(seq.sampling.stop_token_ids)
        self._drafter.bind(slot, seq.namespace)

    def place(
        self, rows: list[Row], *, is_awaited: bool = False, keeps_block: bool = True
    ) -> tuple[list[Row], list[int]]:
        """Drafts tokens for the rows with start CONTINUES and replaces that start by their position, which only the
        worker knows. Returns the completed rows and the number of drafts of each; the draft tokens are written to the
        requests' token tables, or placeholders for them, for which `take_late` waits. is_awaited: the last tokens are
        still being sampled, so no row gets drafts. keeps_block: see StepPlan."""
        self._keeping.is_on = keeps_block
        continuing = [at for at, row in enumerate(rows) if row.start == CONTINUES]
        placed, drafted = list(rows), [0] * len(rows)
        was_granted, self._is_granted = self._is_granted, False
        if not was_granted:
            self._grant(rows[at] for at in continuing)
        wanted = [self._wanted(rows[at]) for at in continuing]
        if is_awaited:
            wanted = [Wanted(one.slot, one.length - 1, 0) for one in wanted]
        if self._most is not None:
            wanted = _at_most(wanted, self._most)
        self._late.slot, self._late.ms, self._late.is_allowed = None, None, len(rows) == 1
        self.has_waited = was_granted or any(one.most > 0 for one in wanted)
        if self.has_waited:
            drafts = self._draft(wanted)
            lagging = self._reading.lagging
            self.lagging_rows = [at for at in continuing if rows[at].req_slot in lagging]
        else:
            drafts, self.draft_ms, self.read_ms, self.lagging_rows = [NO_DRAFT] * len(wanted), 0.0, 0.0, []
            self._untold.update(one.slot for one in wanted)
        self.draft_ms, self._told_ms = self.draft_ms + self._told_ms, 0.0
        for at, draft in zip(continuing, drafts, strict=True):
            placed[at], drafted[at] = self._place(rows[at], draft)
        return placed, drafted

    def _draft(self, wanted: list[Wanted]) -> list[Int32s]:
        """Lets the drafter draft, and notes the time that it takes."""
        self._drafter.catch_up()  # needed with or without drafts
        self._reading.ms, self._reading.lagging = 0.0, set()
        began = SpentTime.begin()
        drafts = self._drafter.draft(wanted)
        spent_ms = began.ms(on_gpu=self._reading.on_gpu)
        self.read_ms = self._reading.ms
        self.draft_ms = max(spent_ms - self.read_ms, 0.0)
        return drafts

    def launch_ahead(self, rows: list[Row], pending: PendingTokens) -> bool:
        """Launches the drafts of the next step, which has these rows, while the tokens before them are being sampled.
        Returns False if it does not. `place` comes next, when these tokens are known."""
        if self._late.launch_ahead is None:
            return False
        continuing = [row for row in rows if row.start == CONTINUES]
        self._grant(continuing)
        self._is_granted = True
        wanted = [self._wanted(row) for row in continuing]
        if self._most is not None:
            wanted = _at_most(wanted, self._most)
        return self._late.launch_ahead(wanted, pending)

    def take_late(self) -> int | None:
        """Waits for the step's late drafts, if any, and writes them to the request's token table. Returns how many are
        to be verified; None: none were late. A second call does the same."""
        slot = self._late.slot
        if slot is None:
            return None
        draft, length = self._late.read(), self.length[slot]
        room = self._sequences.tokens[slot, length : length + self._num_late]
        room[:] = 0
        room[: len(draft)] = draft
        return len(draft)

    @property
    def late_ms(self) -> Callable[[], float] | None:
        """Returns `LateDrafts.ms` of the last `place`; to be called after `take_late`."""
        return self._late.ms

    def take_keep_ms(self) -> float:
        """Returns StepResult.draft_keep_ms since the last call."""
        ms, self._keeping.ms = self._keeping.ms, 0.0
        return ms

    def catch_up(self) -> None:
        """Lets the drafter write the KV that it writes for several steps together."""
        self._drafter.catch_up()

    def computed(self, layout: StepLayout, accepted: Int32s) -> None:
        """Updates the progress after a step was sampled. accepted: int32 [rows], accepted drafts per row."""
        self._drafter.computed(layout, accepted)

    def _grant(self, rows: Iterable[Row]) -> None:
        """Writes the rows' KV slots to their requests' tables."""
        sequences = self._sequences
        for row in rows:
            slot, granted = row.req_slot, self._granted[row.req_slot]
            self._granted[slot] = end = granted + len(row.kv_slots) // 4
            sequences.kv_slots[slot, granted:end] = np.frombuffer(row.kv_slots, np.int32)
            if sequences.has_window_slots:
                sequences.window_slots[slot, granted:end] = np.frombuffer(row.window_slots, np.int32)

    def _wanted(self, row: Row) -> Wanted:
        slot = row.req_slot
        length = self.length[slot]
        # An ended request may have one more row, which must not change its state: that becomes a snapshot.
        has_ended = int(self._sequences.tokens[slot, length - 1]) in self.stop_ids[slot]
        return Wanted(slot, length, 0 if has_ended else row.count - 1)

    def _place(self, row: Row, draft: Int32s) -> tuple[Row, int]:
        slot, sequences = row.req_slot, self._sequences
        length = self.length[slot]
        if slot == self._late.slot:
            self._num_late = len(draft)
        elif len(draft) and (is_span := draft < 0).any():
            # the same tokens were followed by an embedding span earlier
            draft = draft[: int(is_span.argmax())]
        num = len(draft)
        if num:
            sequences.tokens[slot, length : length + num] = draft
        start, stop = length - 1, length + num
        windows = b""
        if sequences.has_window_slots:
            windows = sequences.window_slots[slot, start:stop].tobytes()
        kv_slots = sequences.kv_slots[slot, start:stop].tobytes()
        return Row(slot, start, 1 + num, kv_slots, True, windows), num

    def grew(self, slots: Int32s) -> None:
        """Notes one more token for each of these requests."""
        for slot in slots.tolist():
            self.length[slot] += 1


def _at_most(wanted: list[Wanted], most: int) -> list[Wanted]:
    """Returns `wanted` with at most `most` drafts in all; the last requests lose theirs first."""
    if sum(one.most for one in wanted if one.most > 0) <= most:
        return wanted
    fewer: list[Wanted] = []
    for one in wanted:
        count = min(one.most, most)
        most -= max(count, 0)
        fewer.append(one._replace(most=count))
    return fewer
