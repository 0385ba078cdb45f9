"""A step plan while it is built and while it is in flight: its rows, and whose they are."""

from __future__ import annotations

from collections.abc import Sequence

from moeserve.messages.schema import NewSeq, Row, StepPlan
from moeserve.router.core.request import INT32_BYTES, Request
from moeserve.router.core.token_pool import TokenPool


class Flight:
    """Written by `Scheduler.plan`; read again when the result comes. A row takes its slots from the pool and
    gives them to its request here, so that no row is without."""

    __slots__ = ("new_seqs", "owners", "prompt_tokens", "rows", "sampling", "silent_ends", "step")

    def __init__(self, step: int) -> None:
        self.step = step
        self.new_seqs: list[NewSeq] = []
        self.rows: list[Row] = []
        self.owners: list[Request] = []  # of each row
        self.sampling: list[Request] = []  # of each row that samples: who gets the result's tokens
        self.silent_ends: list[Request] = []  # max_tokens 0: over when this plan is done
        self.prompt_tokens = 0

    def as_plan(self) -> StepPlan:
        return StepPlan(step=self.step, new_seqs=self.new_seqs, rows=self.rows)

    def add_decode_rows(self, requests: Sequence[Request], pool: TokenPool) -> None:
        """One row for each: the hot loop, about 0.4 us a row."""
        taken = pool.alloc(len(requests))
        packed = taken.tobytes()
        end = 0
        rows = self.rows
        for request, slot in zip(requests, taken, strict=True):
            begin, end = end, end + INT32_BYTES
            slots = request.slots
            rows.append(Row(request.req_slot, len(slots), 1, packed[begin:end], True))
            slots.append(slot)
        self.owners.extend(requests)
        self.sampling.extend(requests)

    def add_chunk(self, request: Request, count: int, pool: TokenPool, now: float) -> None:
        """The next `count` tokens of a prompt; with the first of them, what the worker must know of it."""
        if not request.announced:
            request.announced = True
            request.first_planned_at = now
            self.new_seqs.append(
                NewSeq(
                    req_slot=request.req_slot,
                    token_ids=request.token_ids,
                    num_prompt=request.num_prompt,
                    prefix_slots=b"",
                    sampling=request.sampling,
                )
            )
        taken = pool.alloc(count)
        start = len(request.slots)
        request.slots.extend(taken)
        is_last = request.prompt_left == 0
        sample = is_last and request.sampling.max_tokens > 0
        self.rows.append(Row(request.req_slot, start, count, taken.tobytes(), sample))
        self.owners.append(request)
        self.prompt_tokens += count
        if sample:
            self.sampling.append(request)
        elif is_last:
            self.silent_ends.append(request)
