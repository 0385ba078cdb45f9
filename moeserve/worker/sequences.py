"""The worker's record of requests and of a step's rows: converts plans to arrays, and chosen tokens to results."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import astuple

from moeserve.kernels.sampling.cpu import NONE_ALLOWED
from moeserve.messages.sampling import TokenLogprob
from moeserve.messages.steps import Fork, NewSeq, Row, Sampled

log = logging.getLogger(__name__)

Int32s = npt.NDArray[np.int32]

NO_TOKEN_ALLOWED = (
    "no token is allowed: min_tokens forbids the end and stop tokens so far, and the answer's format or its thinking "
    "budget permits no other; lower min_tokens, or leave out what forbids them"
)


class PromptSpan(NamedTuple):
    row: int  # index in the plan
    logit_rows: Int32s  # rows of the step whose logits predict the targets
    targets: Int32s  # token ids
    top_n: int


class Sequences:
    """The worker's record of each request slot. Owned by the runner.

    tokens, kv_slots, window_slots: int32 [max_num_seqs, max_model_len], by position. Memory of unused request slots
    is never allocated. window_slots equals kv_slots if windowed layers share the pool; otherwise only the last
    positions' entries are valid.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        adapter_numbers: Mapping[str, int] | None = None,
        *,
        has_window_slots: bool = False,
    ) -> None:
        """adapter_numbers: adapter key → number in the engine; its entries change while the server runs."""
        self.tokens: Int32s = np.zeros((max_num_seqs, max_model_len), np.int32)
        numbers = np.zeros(max_num_seqs * max_model_len + 1, np.int32)
        self.kv_slots: Int32s = numbers[:-1].reshape(max_num_seqs, max_model_len)
        # A view of the same memory, shifted: at each position the KV slot of the next one.
        self.kv_slots_ahead: Int32s = numbers[1:].reshape(max_num_seqs, max_model_len)
        self.has_window_slots = has_window_slots
        self.window_slots: Int32s = np.zeros_like(self.kv_slots) if has_window_slots else self.kv_slots
        # Slot of each sequence's recurrent state.
        self.state_slots: Int32s = np.full(max_num_seqs, -1, np.int32)
        self.adapters: Int32s = np.full(max_num_seqs, -1, np.int32)  # -1: no adapter
        self._adapter_numbers = {"": -1} if adapter_numbers is None else adapter_numbers
        self.num_prompt = [0] * max_num_seqs
        self.prompt_logprobs: list[int | None] = [None] * max_num_seqs
        self.request_ids = [""] * max_num_seqs

    def bind(self, seq: NewSeq) -> Int32s:
        """Initialises a request slot. Returns the known tokens, prompt first."""
        tokens = np.frombuffer(seq.token_ids, np.int32)
        prefix = np.frombuffer(seq.prefix_slots, np.int32)
        self.tokens[seq.req_slot, : len(tokens)] = tokens
        self.kv_slots[seq.req_slot, : len(prefix)] = prefix
        if self.has_window_slots:
            windows = np.frombuffer(seq.prefix_window_slots, np.int32)
            first = len(prefix) - len(windows)
            # Attention also reads keys before the window and masks them. Those entries must not name slots that the
            # previous request got for drafts: such slots may never have been written.
            self.window_slots[seq.req_slot, :first] = 0
            self.window_slots[seq.req_slot, first : len(prefix)] = windows
        self.state_slots[seq.req_slot] = seq.state_slot
        self.adapters[seq.req_slot] = self._adapter_numbers[seq.adapter]
        self.num_prompt[seq.req_slot] = seq.num_prompt
        self.prompt_logprobs[seq.req_slot] = seq.sampling.prompt_logprobs
        self.request_ids[seq.req_slot] = seq.request_id
        return tokens

    def fork(self, forks: Sequence[Fork]) -> tuple[Int32s, Int32s, int]:
        """Copies the tables as `Fork` says. Returns the target request slots, the source request slots, and the number
        of positions copied; entries beyond a slot's own length are not read."""
        target, source, position, token = np.array([astuple(fork) for fork in forks], np.int32).T
        copied = target != source
        targets, sources, end = target[copied], source[copied], int(position[copied].max(initial=0))
        self.tokens[targets, :end] = self.tokens[sources, :end]
        self.kv_slots[targets, :end] = self.kv_slots[sources, :end]
        if self.has_window_slots:
            self.window_slots[targets, :end] = self.window_slots[sources, :end]
        self.tokens[target, position] = token
        return targets, sources, end

    def previous(self, layout: StepLayout, count: int) -> Int32s:
        """Returns the `count` tokens before each row of a step, int32 [n, count], the nearest first; -1 before the
        request's first token."""
        positions = layout.position[:, None] - np.arange(1, count + 1, dtype=np.int32)
        tokens = self.tokens[layout.sequence[:, None], np.maximum(positions, 0)]
        return np.where(positions < 0, np.int32(-1), tokens)

    def expect(self, slots: Int32s, positions: Int32s) -> None:
        """Writes placeholders for tokens that are being sampled: -1 - i for the i-th, until `append`."""
        inside = positions < self.tokens.shape[1]
        self.tokens[slots[inside], positions[inside]] = -1 - np.flatnonzero(inside)

    def append(self, slots: Int32s, positions: Int32s, tokens: Int32s) -> None:
        """Stores sampled tokens: tokens[i] at positions[i] of request slot slots[i], int32 [n] each. The last token of
        a full context is never an input and is not stored. If a request has just failed, its token is replaced by 0,
        which has an embedding: the plan already on its way may still have a row of this request."""
        if positions.max(initial=0) >= self.tokens.shape[1]:
            inside = positions < self.tokens.shape[1]
            slots, positions, tokens = slots[inside], positions[inside], tokens[inside]
        self.tokens[slots, positions] = np.maximum(tokens, 0)

    def prompt_spans(self, rows: list[Row], layout: StepLayout, at_most: int) -> Iterator[PromptSpan]:
        """Yields the prompt logprobs that a step must compute, in order, in spans of up to `at_most` tokens."""
        for index, row in enumerate(rows):
            top_n = self.prompt_logprobs[row.req_slot]
            if top_n is None:
                continue
            # Position p predicts the token at p + 1; the prompt's last position predicts no prompt token.
            last = min(row.start + row.count, self.num_prompt[row.req_slot] - 1)
            for start in range(row.start, last, at_most):
                end = min(start + at_most, last)
                logit_rows = np.arange(start, end, dtype=np.int32) - row.start + layout.offset[index]
                yield PromptSpan(index, logit_rows, self.tokens[row.req_slot, start + 1 : end + 1], top_n)


def log_bound(seq: NewSeq, num_tokens: int) -> None:
    """Logs that a request got its slot, with `num_tokens` tokens."""
    if log.isEnabledFor(logging.DEBUG):
        cached = len(seq.prefix_slots) // 4
        extra = {"request_id": seq.request_id}
        log.debug("slot %d: %d tokens, %d cached", seq.req_slot, num_tokens, cached, extra=extra)


class StepLayout:
    """A plan's rows as arrays; `offset[i]` is row i's first index in the step."""

    def __init__(self, rows: list[Row], drafted: Sequence[int] | None = None) -> None:
        """drafted: number of trailing drafts in each row; None: no drafts let the step wait."""
        self.rows = rows
        self.drafted: Int32s | None = None if drafted is None else np.array(drafted, np.int32)
        counts = [row.count for row in rows]
        self.n = sum(counts)
        self.req_slot: Int32s
        self.start: Int32s
        self.count: Int32s
        self.offset: Int32s
        self.req_slot, self.start, self.count, self.offset = np.array(
            [
                [row.req_slot for row in rows],
                [row.start for row in rows],
                counts,
                [end - count for end, count in zip(accumulate(counts), counts, strict=True)],
            ],
            np.int32,
        )
        self.kv_slots = np.frombuffer(b"".join([row.kv_slots for row in rows]), np.int32)
        # slots in the windowed layers' own pool; empty without one
        self.window_slots = np.frombuffer(b"".join([row.window_slots for row in rows]), np.int32)
        # [n] each. With one token per row, the usual case, they equal the row arrays, which saves microseconds.
        self.sequence: Int32s = self.req_slot
        self.position: Int32s = self.start
        if self.n != len(rows):
            self.sequence = np.repeat(self.req_slot, self.count)
            self.position = np.repeat(self.start - self.offset, self.count) + np.arange(
                self.n, dtype=np.int32
            )
        self.sampled_slots: Int32s = self.req_slot
        self.sampled_rows: Int32s = self.offset + self.count - 1
        self.sampled_positions: Int32s = self.start + self.count  # positions of the new tokens
        if not all(row.sample for row in rows):
            sampling = [row.sample for row in rows]
            self.sampled_slots = self.sampled_slots[sampling]
            self.sampled_rows = self.sampled_rows[sampling]
            self.sampled_positions = self.sampled_positions[sampling]
        if self.drafted is not None and self.drafted.any():
            self._sample_drafts(np.array([row.sample for row in rows], np.bool_))

    def _sample_drafts(self, is_sampling: npt.NDArray[np.bool_]) -> None:
        """Orders the sampled positions: first, for each sampling row, the position after its known tokens; then the
        positions after each row's first draft; then after its second draft, and so on."""
        assert self.drafted is not None
        drafted, first = self.drafted[is_sampling], self.sampled_rows - self.drafted[is_sampling]
        rounds = [np.flatnonzero(drafted >= number) for number in range(int(drafted.max()) + 1)]
        self.sampled_rows = np.concatenate([first[deep] + number for number, deep in enumerate(rounds)])
        slots, positions = self.sampled_slots, self.sampled_positions - drafted
        self.sampled_slots = np.concatenate([slots[deep] for deep in rounds])
        self.sampled_positions = np.concatenate(
            [positions[deep] + number for number, deep in enumerate(rounds)]
        )


def first_drafts(drafted: Int32s) -> Int32s:
    """Returns the index of each row's first draft among the step's drafts."""
    first: Int32s = np.cumsum(drafted, dtype=np.int32) - drafted
    return first


def entries(
    tokens: Int32s, logprobs: Sequence[TokenLogprob | None], failed: dict[int, str], late: Collection[int]
) -> list[Sampled]:
    """Returns a step's results, one for each sampled row. tokens: int32 [rows]; logprobs: of each row. failed: row →
    why its request cannot continue. late: rows without a token in this step. A missing token is -1."""
    chosen = tokens.tolist()
    if NONE_ALLOWED in chosen:
        rows = (row for row, token in enumerate(chosen) if token == NONE_ALLOWED)
        failed = dict.fromkeys(rows, NO_TOKEN_ALLOWED) | failed
    sampled = list(map(Sampled, chosen, logprobs))
    for row, error in failed.items():
        sampled[row] = Sampled(-1, error=error)
    for row in late:
        sampled[row] = Sampled(-1, late=True)
    return sampled
