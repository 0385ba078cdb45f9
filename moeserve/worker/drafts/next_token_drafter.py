"""Drafts by the model's own next-token block (MTP): see models/next_token.py.

The block needs the model's states, which are there when a step is computed, and the tokens behind them, the last of
which are sampled afterwards:

    a step computes      p .. p+c-1          their states are known
    computed()           stores rows p .. p+c-1 of the block, keeps the state at p+c-1
    draft()              computes row p+c, whose token has been sampled; then rows of drafts, one after another

Rows of drafts lie in KV slots that the next `computed` writes again, as the model's own states are known then. Where a
request begins behind a cached prefix, nothing is known of the state before its first row, which is computed with zeros:
one row of the block's attention, which guesses less well.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from moeserve.models.blocks.cpu.next_token import CpuNextTokenBlock, NextTokenRows
from moeserve.worker.drafts.drafter import Wanted
from moeserve.worker.sequences import Int32s, Sequences, StepLayout

# A draft that is less likely than this by the block's own reckoning is not verified, nor any behind it.
LEAST_PROBABILITY = 0.5


class NextTokenDrafter:
    """See `Drafter`."""

    def __init__(
        self, sequences: Sequences, block: CpuNextTokenBlock, least_probability: float = LEAST_PROBABILITY
    ) -> None:
        self._sequences = sequences
        self._block = block
        self._least = least_probability
        slots = len(sequences.num_prompt)
        # Of each request slot: the model's last state, and the number of the row that takes it.
        self._states = torch.zeros(slots, block.hidden_size)
        self._next: Int32s = np.zeros(slots, np.int32)
        self._stored: Int32s = np.zeros(slots, np.int32)  # the first row that is not stored

    def bind(self, slot: int) -> None:
        self._states[slot] = 0.0
        self._next[slot] = self._stored[slot] = 0

    def draft(self, wanted: Sequence[Wanted]) -> list[Int32s]:
        drafts: list[list[int]] = [[] for _ in wanted]
        active = np.array(
            [at for at, one in enumerate(wanted) if one.most > 0 and self._next[one.slot] == one.length - 1],
            np.int32,
        )
        if len(active) == 0:
            return [np.zeros(0, np.int32) for _ in wanted]
        slots, length, most = np.array([wanted[at] for at in active], np.int32).T.copy()
        tokens, states = (
            self._sequences.tokens[slots, length - 1],
            self._states[torch.from_numpy(slots)],
        )
        self._stored[slots] = length
        depth = 0
        while len(active):
            positions = length - 2 + depth
            rows = NextTokenRows(tokens, states, positions, self._sequences.kv_slots[slots, positions + 1])
            found = self._block.predict(rows, slots, self._sequences.kv_slots_ahead)
            likely = found.probabilities >= self._least
            for at, token in zip(active[likely].tolist(), found.token_ids[likely].tolist(), strict=True):
                drafts[at].append(token)
            depth += 1
            goes_on = np.flatnonzero(likely & (most > depth))
            active, slots, length, most = active[goes_on], slots[goes_on], length[goes_on], most[goes_on]
            tokens, states = found.token_ids[goes_on], found.states[torch.from_numpy(goes_on)]
        return [np.array(draft, np.int32) for draft in drafts]

    def computed(self, layout: StepLayout, accepted: Int32s) -> None:
        count = layout.count + accepted
        if layout.drafted is not None:
            count = count - layout.drafted
        states = self._block.model_states(layout.n)
        before = torch.empty_like(states)
        before[1:] = states[:-1]
        slots = torch.from_numpy(layout.req_slot.astype(np.int64))
        begins = self._next[layout.req_slot] == layout.start
        before[torch.from_numpy(layout.offset.astype(np.int64))] = (
            self._states[slots] * torch.from_numpy(begins)[:, None]
        )
        self._states[slots] = states[torch.from_numpy((layout.offset + count - 1).astype(np.int64))]
        stored = np.maximum(self._stored[layout.req_slot], 1)
        self._next[layout.req_slot] = self._stored[layout.req_slot] = layout.start + count
        first, end = np.maximum(stored, layout.start), layout.start + count
        rows = np.concatenate(
            [
                np.arange(offset + max(begin - start, 0), offset + stop - start)
                for offset, start, begin, stop in zip(
                    layout.offset.tolist(), layout.start.tolist(), first.tolist(), end.tolist(), strict=True
                )
            ]
        ).astype(np.int64)
        if len(rows) == 0:
            return
        sequence, position = layout.sequence[rows], layout.position[rows]
        tokens = np.maximum(self._sequences.tokens[sequence, position], 0)
        self._block.store(
            NextTokenRows(tokens, before[torch.from_numpy(rows)], position - 1, layout.kv_slots[rows])
        )
