"""Launches the kernels that only a next-token block needs on a GPU: its inputs, and the choice of its drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from moeserve.kernels._C import PANEL_ROWS
from moeserve.kernels.launch import next_power_of_2
from moeserve.kernels.next_token.triton import (
    advance_kernel,
    clear_kernel,
    join_kernel,
    keep_rows_kernel,
    keep_step_kernel,
    likeliest_kernel,
    place_drafts_kernel,
    places_kernel,
    start_after_step_kernel,
)

PLACES_BLOCK: Final = 256
LOGITS_BLOCK: Final = 1024
PARTS: Final = 64  # programs of a row of logits


@dataclass(frozen=True, slots=True)
class KeptStates:
    """For each request slot, the model's hidden state at the position before the next row of the block that drafts, and
    that next row's position. A later step reads it if its first row is at this position."""

    states: Tensor  # float32 [request slots, hidden]
    position: Tensor  # int32 [request slots]; -1: none

    @staticmethod
    def empty(slots: int, hidden: int, device: torch.device) -> KeptStates:
        return KeptStates(
            torch.zeros(slots, hidden, device=device),
            torch.full((slots,), -1, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class StepStates:
    """A step's rows: their hidden states, float32 [n, hidden], their positions and request slots, int32 [n]."""

    states: Tensor
    positions: Tensor
    req_slots: Tensor
    count: Tensor  # int32 [1]: valid rows


@dataclass(frozen=True, slots=True)
class JoinNorms:
    token: Tensor  # float32 [hidden], as is state
    state: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class BlockPlaces:
    """A step's rows as rows of the block; int32 [n] each."""

    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor

    @staticmethod
    def empty(rows: int, device: torch.device) -> BlockPlaces:
        return BlockPlaces(*torch.zeros(3, rows, dtype=torch.int32, device=device))


def block_places(ids: Tensor, positions: Tensor, kv_slots: Tensor, count: Tensor, out: BlockPlaces) -> None:
    """Launches the conversion of a step's rows to rows of the next-token block, and writes the first count[0] of `out`.
    ids, positions, kv_slots: int32 [n], the step's."""
    n = len(ids)
    places_kernel(
        (-(-n // PLACES_BLOCK),), ids, positions, kv_slots, count, out.token_ids, out.positions, out.kv_slots, n,
        PLACES_BLOCK,
    )  # fmt: skip


def join_step(
    x: Tensor, step: StepStates, first: int, kept: KeptStates, norms: JoinNorms, count: Tensor, joined: Tensor
) -> None:
    """Computes joined[i] = [norm of x[i], norm of the hidden state before row first + i of the step], for i <
    count[0].

    x float32 [n, hidden], joined float32 [n, 2 * hidden]. The state before a row is the previous row's of its request,
    or the kept one if it is of that position, or 0."""
    n, hidden = x.shape
    join_kernel(
        (n,), x, step.states, step.positions, step.req_slots, kept.states, kept.position, norms.token, norms.state,
        count, joined, first, hidden, next_power_of_2(hidden), norms.eps, num_warps=4,
    )  # fmt: skip


def join_rows(x: Tensor, states: Tensor, norms: JoinNorms, count: Tensor, joined: Tensor) -> None:
    """Computes joined[i] = [norm of x[i], norm of states[i]] for i < count[0]: float32 [n, 2 * hidden]. x: float32
    [n, hidden]; states: float32 [n, hidden], the hidden state before each row."""
    n, hidden = x.shape
    join_kernel(
        (n,), x, states, None, None, None, None, norms.token, norms.state, count, joined, 0, hidden,
        next_power_of_2(hidden), norms.eps, num_warps=4,
    )  # fmt: skip


def keep_step(step: StepStates, kept: KeptStates) -> None:
    """Keeps the state of each request's last row, for the position after it."""
    n, hidden = step.states.shape
    keep_step_kernel(
        (n,), step.states, step.positions, step.req_slots, step.count, kept.states, kept.position, hidden,
        next_power_of_2(hidden), n, num_warps=4,
    )  # fmt: skip


def keep_rows(states: Tensor, chosen: Tensor, count: int, kept: KeptStates) -> None:
    """Keeps the states of `count` requests' rows. chosen: int32 [3, count or more]: each request's slot, its row
    (negative: its kept state is dropped) and the next position; all slots differ."""
    hidden = states.shape[1]
    keep_rows_kernel(
        (count,), states, chosen, kept.states, kept.position, chosen.stride(0), hidden, next_power_of_2(hidden),
        num_warps=4,
    )  # fmt: skip


def clear_rows(tensors: Sequence[Tensor], kv_slots: Tensor, count: Tensor) -> None:
    """Zeroes the rows of these KV slots in each of the tensors [slots, ..], for the first count[0] slots that are not
    negative. kv_slots: int32 [n]."""
    for tensor in tensors:
        if len(tensor):
            rows = tensor.view(len(tensor), -1).view(torch.uint8)
            width = rows.shape[1]
            clear_kernel((len(kv_slots),), rows, kv_slots, count, width, next_power_of_2(width), num_warps=4)


class Chosen:
    """Scratch of `draft_of`, for up to `rows` rows."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.best = torch.empty(rows, PARTS, device=device)
        self.sums = torch.empty(rows, PARTS, device=device)
        self.ids = torch.empty(rows, PARTS, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class ChainRows:
    """Rows of a chain of drafts: int32 [n] each, except planned_slots and drafts, int32 [depths, n], and
    probabilities, float32 [depths, n]."""

    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    depth: Tensor  # drafts so far
    most: Tensor  # drafts of the row at most
    planned_slots: Tensor  # KV slots of the block's rows, by depth
    drafts: Tensor
    probabilities: Tensor
    # RoPE positions, int32 [n, sections], and by depth, [depths, n, sections]; None: rows rotate by their positions
    rotary: Tensor | None = None
    planned_rotary: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ScoredPanels:
    """The part of the vocabulary whose logits a draft needs: panels of PANEL_ROWS consecutive token ids."""

    panels: Tensor  # int32 [most], ascending: panels of PANEL_ROWS tokens
    count: Tensor  # int32 [1]: valid panels


def draft_of(
    logits: Tensor,
    count: Tensor,
    chosen: Chosen,
    rows: ChainRows,
    scored: ScoredPanels | None = None,
    token_of: Tensor | None = None,
) -> None:
    """Chooses each row's likeliest token as its next draft, and makes it the row's next input: for i < count[0].
    logits float32 [n, vocab], whose first columns are those of `scored`; None: of the whole vocabulary. token_of: int32
    [vocab], the token whose score a column is; None: the column's number."""
    n, vocab = logits.shape
    most = vocab if scored is None else min(vocab, len(scored.panels) * PANEL_ROWS)
    span = -(-most // (PARTS * LOGITS_BLOCK)) * LOGITS_BLOCK
    of_panels = (None, None) if scored is None else (scored.panels, scored.count)
    likeliest_kernel(
        (n, PARTS), logits, count, *of_panels, chosen.best, chosen.ids, chosen.sums, vocab, PARTS, span, LOGITS_BLOCK,
        PANEL_ROWS, num_warps=4,
    )  # fmt: skip
    advance_kernel(
        (n,), chosen.best, chosen.ids, chosen.sums, count, rows.depth, rows.most, rows.planned_slots, rows.token_ids,
        rows.positions, rows.kv_slots, rows.drafts, rows.probabilities, rows.rotary, rows.planned_rotary, token_of,
        PARTS, PARTS, rows.drafts.stride(0), 0 if rows.rotary is None else rows.rotary.shape[1], num_warps=1,
    )  # fmt: skip


def place_drafts(ids: Tensor, count: Tensor, rows: ChainRows, least: Tensor) -> None:
    """Completes a step of one request whose last rows verify drafts that the host does not know.

    A placeholder -1 - i in ids becomes the i-th number of `rows.drafts`, and count[0] is lowered to the rows before the
    first draft that is less likely than least[0]. ids int32 [n], count int32 [1], least float32 [1]."""
    depths = len(rows.drafts)
    place_drafts_kernel(
        (1,), ids, count, rows.drafts, rows.probabilities, least, next_power_of_2(1 + depths), num_warps=1
    )


@dataclass(frozen=True, slots=True)
class SampledStep:
    """A step whose rows' tokens were sampled on the GPU, which the host may not have read yet."""

    tokens: Tensor  # int32 [any]: the sampled ones
    token_ids: Tensor  # int32 [n]: of its rows, the drafts among them
    count: Tensor  # int32 [1]: valid rows


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The places where a step has sampled the tokens of a chain's requests: int32 [n] each, but places and slots."""

    rows: Tensor  # the request's first row that samples; drafts follow it
    drafted: Tensor  # how many
    positions: Tensor  # of the first token sampled
    shifts: Tensor  # what is added to positions for RoPE, where `ChainRows.rotary` is
    places: Tensor  # [1 + depths, n]: of each token among the step's sampled ones
    slots: Tensor  # [2 * depths, n]: KV slots of the positions from `positions` on


def start_after_step(
    step: SampledStep,
    sampled: SampledRows,
    states: Tensor,
    req_slots: Tensor,
    valid: Tensor,
    rows: ChainRows,
    chain_states: Tensor,
    kept: KeptStates,
) -> None:
    """Launches the first rows of a chain after tokens that the host need not know. The drafts of a request that agree
    with the tokens sampled count as accepted; its chain begins with the token sampled after them.

    states float32 [any, hidden]: of the step's rows. Writes, for i < valid[0], token, position and KV slots of `rows`,
    and the hidden state before the row, to chain_states float32 [n, hidden] and to `kept`. depths is
    len(rows.planned_slots)."""
    n, hidden = chain_states.shape
    start_after_step_kernel(
        (n,), step.tokens, step.token_ids, step.count, states, sampled.places, sampled.rows, sampled.drafted,
        sampled.positions, sampled.shifts, sampled.slots, req_slots, valid, rows.token_ids, rows.positions,
        rows.kv_slots, rows.planned_slots, rows.rotary, rows.planned_rotary, chain_states, kept.states, kept.position,
        len(rows.planned_slots), rows.planned_slots.stride(0), 0 if rows.rotary is None else rows.rotary.shape[1],
        hidden, next_power_of_2(hidden), num_warps=4,
    )  # fmt: skip
