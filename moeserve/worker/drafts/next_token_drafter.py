"""Drafts by the model's own next-token block (multi-token prediction, MTP): see models/next_token.py.

The block needs the model's hidden states, known when a step is computed, and the tokens after them, the last of
which is sampled afterwards:

    a step computes      p .. p+c-1          their hidden states are known
    computed()           keeps the hidden states
    draft()              stores rows p .. p+c-1 of the block, keeps the state at p+c-1,
                         computes row p+c, whose token has been sampled; then draft rows, one after another

While `Keeping.is_on` is False, no row is stored: the KV slots of the texts are zeroed, so that none has the rows of
another request, and nothing is drafted for these requests until it is on again.

The KV of draft rows is overwritten later, when the model's own states are known. After a cached prefix, the state
before the first row is unknown and taken as zeros: one row of the block's attention is then less accurate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from moeserve.messages.prompt_embeddings import SECTIONS
from moeserve.models.blocks.cpu.next_token import NextTokenRows, Predicted
from moeserve.worker.drafts.drafter import NO_DRAFT, Wanted
from moeserve.worker.drafts.shortlist import Shortlist
from moeserve.worker.drafts.spent_time import SpentTime
from moeserve.worker.engines.keeping import Keeping
from moeserve.worker.engines.rotary_positions import RotaryPositions
from moeserve.worker.sequences import Int32s, Sequences, StepLayout

Floats = npt.NDArray[np.float32]

# Drafts that the block itself considers less likely than this are not verified, nor are those after them.
LEAST_PROBABILITY = 0.5
# Rows stored together for several steps: this is nearly free while nothing is drafted.
MOST_LATE = 64
UNKNOWN = -1  # instead of a row number: the model's last hidden state is not known


class _Computed(NamedTuple):
    """A step whose rows are not stored yet."""

    layout: StepLayout
    accepted: Int32s
    rotary: Int32s  # [n] or [3, n]: RoPE positions of the tokens before its rows
    rows: torch.Tensor  # hidden states before the output norm


class DraftingBlock(Protocol):
    """A block that drafts from the model's states: `CpuNextTokenBlock` or `CpuDraftHeadBlock`, which describe it."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def frequent_tokens(self) -> int | None: ...

    @property
    def most_rows(self) -> int: ...

    def wait(self) -> None: ...

    def model_rows(self, n: int) -> torch.Tensor: ...

    def model_states(self, rows: torch.Tensor) -> torch.Tensor: ...

    def store(self, rows: NextTokenRows) -> None: ...

    def clear(self, kv_slots: Int32s) -> None: ...

    def predict(
        self, rows: NextTokenRows, req_slots: Int32s, slot_table: Int32s, panels: Int32s | None = None
    ) -> Predicted: ...


class NextTokenDrafter:
    """A `Drafter` that drafts with a block on the CPU: the model's own next-token block or an EAGLE-3
    head."""

    def __init__(
        self,
        sequences: Sequences,
        block: DraftingBlock,
        least_probability: float = LEAST_PROBABILITY,
        keeping: Keeping | None = None,
        rotary: RotaryPositions | None = None,
    ) -> None:
        """keeping: whether to compute the texts' new tokens in every step, and the time that takes; None: always.
        rotary: RoPE positions of requests with pictures; None: they are the tokens' numbers."""
        self._sequences = sequences
        self._block = block
        self._least = least_probability
        self._shortlist = Shortlist(sequences.tokens, block.vocab_size, block.frequent_tokens)
        self._keeping = Keeping() if keeping is None else keeping
        self._rotary = RotaryPositions() if rotary is None else rotary
        slots = len(sequences.num_prompt)
        # Per request slot: the model's last hidden state, and the number of the row that consumes it.
        self._states: Floats = np.zeros((slots, block.hidden_size), np.float32)
        self._next: Int32s = np.zeros(slots, np.int32)
        self._stored: Int32s = np.zeros(slots, np.int32)  # first row that is not stored
        self._late: list[_Computed] = []
        self._num_late = 0  # rows
        self._left: list[Int32s] = []  # KV slots of steps that were left, to be zeroed
        self._most_late = min(MOST_LATE, block.most_rows)

    def bind(self, slot: int, namespace: str) -> None:
        self.catch_up()
        self._shortlist.bind(slot)
        self._states[slot] = 0.0
        self._next[slot] = self._stored[slot] = 0

    def draft(self, wanted: Sequence[Wanted]) -> list[Int32s]:
        drafts: list[list[int]] = [[] for _ in wanted]
        active = np.array(
            [at for at, one in enumerate(wanted) if one.most > 0 and self._next[one.slot] == one.length - 1],
            np.int32,
        )
        if len(active) == 0:
            return [NO_DRAFT for _ in wanted]
        slots, length, most = np.array([wanted[at] for at in active], np.int32).T.copy()
        tokens, states = (
            self._sequences.tokens[slots, length - 1],
            torch.from_numpy(self._states[slots]),
        )
        self._stored[slots] = length
        panels = self._shortlist.panels(slots, length)
        depth = 0
        while len(active):
            positions = length - 2 + depth
            kv_slots = self._sequences.kv_slots[slots, positions + 1]
            rotary = self._rotary.of_tokens(slots, positions)
            rows = NextTokenRows(tokens, states, positions, kv_slots, rotary)
            found = self._block.predict(rows, slots, self._sequences.kv_slots_ahead, panels)
            # The coverage estimates the probability of the tokens that are not scored.
            share = 1.0 if panels is None else self._shortlist.coverage[slots]
            likely = found.probabilities * share >= self._least
            for at, token in zip(active[likely].tolist(), found.token_ids[likely].tolist(), strict=True):
                drafts[at].append(token)
            depth += 1
            goes_on = np.flatnonzero(likely & (most > depth))
            active, slots, length, most = active[goes_on], slots[goes_on], length[goes_on], most[goes_on]
            tokens, states = found.token_ids[goes_on], found.states[torch.from_numpy(goes_on)]
        return [np.array(draft, np.int32) for draft in drafts]

    def computed(self, layout: StepLayout, accepted: Int32s) -> None:
        # A step that samples nothing (a chunk of a prompt) may still run. This wait is not charged to the block.
        self._block.wait()
        began = SpentTime.begin()
        if self._keeping.is_on:
            self._keep(layout, accepted)
        else:
            self._leave(layout)
        self._keeping.ms += began.ms()

    def _keep(self, layout: StepLayout, accepted: Int32s) -> None:
        self._clear_left()
        if self._num_late + layout.n > self._most_late:
            self._store_late()
        # Now, as a request's pictures are forgotten when its slot is another's. Its tokens are there until `bind`.
        rotary = self._rotary.at(layout, layout.position - 1)
        self._late.append(_Computed(layout, accepted, rotary, self._block.model_rows(layout.n)))
        self._num_late += layout.n
        if self._num_late > self._most_late:
            self._store_late()

    def _leave(self, layout: StepLayout) -> None:
        """Forgets the state of the step's requests. Their rows are zeroed for several steps together."""
        self._store_late()
        self._left.append(layout.kv_slots)
        if len(self._left) >= MOST_LATE or layout.n > MOST_LATE:
            self._clear_left()
        self._next[layout.req_slot] = UNKNOWN

    def _clear_left(self) -> None:
        if self._left:
            self._block.clear(np.concatenate(self._left))
            self._left.clear()

    def catch_up(self) -> None:
        """Stores the rows of all steps so far, or zeroes them."""
        if self._late or self._left:
            began = SpentTime.begin()
            self._store_late()
            self._clear_left()
            self._keeping.ms += began.ms()

    def _store_late(self) -> None:
        late, self._late, self._num_late = self._late, [], 0
        if not late:
            return
        states = self._block.model_states(torch.cat([step.rows for step in late])).numpy()
        first, found = 0, []
        for step in late:
            found.append(self._rows_of(step, states[first : first + step.layout.n]))
            first += step.layout.n
        tokens, positions, kv_slots, before, by_section = map(np.concatenate, zip(*found, strict=True))
        # A slot that another request has got meanwhile has the later one's row.
        _, last = np.unique(kv_slots[::-1], return_index=True)
        if len(last):
            chosen = np.sort(len(kv_slots) - 1 - last)
            rotary = by_section[chosen]
            is_text = bool((rotary == rotary[:, :1]).all())
            rotary = rotary[:, 0].copy() if is_text else rotary.T.copy()
            rows = tokens[chosen], torch.from_numpy(before[chosen]), positions[chosen], kv_slots[chosen]
            self._block.store(NextTokenRows(*rows, rotary))

    def _rows_of(self, step: _Computed, states: Floats) -> tuple[Int32s, Int32s, Int32s, Floats, Int32s]:
        """Returns the rows that a step allows the block to store: tokens, positions, KV slots, the hidden states
        before them, and RoPE positions, [rows, 3]. Keeps the last states."""
        layout = step.layout
        slots, start, count = layout.req_slot, layout.start, layout.count + step.accepted
        if layout.drafted is not None:
            count = count - layout.drafted
        before = np.empty_like(states)
        before[1:] = states[:-1]
        before[layout.offset] = self._states[slots] * (self._next[slots] == start)[:, None]
        self._states[slots] = states[layout.offset + count - 1]
        first, end = np.maximum(self._stored[slots], 1), start + count
        self._next[slots] = self._stored[slots] = end
        if layout.n != len(layout.rows):
            of_row = np.repeat(np.arange(len(layout.rows)), layout.count)
            first, end = first[of_row], end[of_row]
        # Skip rows that are stored already, and rejected drafts.
        chosen = np.flatnonzero((layout.position >= first) & (layout.position < end))
        positions = layout.position[chosen] - 1
        tokens = np.maximum(self._sequences.tokens[layout.sequence[chosen], positions + 1], 0)
        rotary = np.broadcast_to(step.rotary, (SECTIONS, layout.n)).T[chosen]
        return tokens, positions, layout.kv_slots[chosen], before[chosen], rotary
