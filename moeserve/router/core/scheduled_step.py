"""A step plan while it is built and while it is in flight: its rows, and whose they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import iter_unpack

import msgspec

from moeserve.messages.schema import NewSeq, Row, SamplingParams, StepPlan
from moeserve.router.core.kv_memory import KvMemory
from moeserve.router.core.request import Request
from moeserve.router.core.step_cost import StepShape, chunk_context


class ScheduledStep:
    """Written while it is planned; read again when the result comes. A row takes its slots from the memory and
    gives them to its request here, so that no row is without."""

    __slots__ = (
        "_decode_context",
        "_prompt_context",
        "expected_ms",
        "fresh_tokens",
        "new_seqs",
        "num_decode",
        "owners",
        "prompt_tokens",
        "protected_share",
        "repeated_tokens",
        "rows",
        "sampling",
        "silent_ends",
        "step",
    )

    def __init__(self, step: int) -> None:
        self.step = step
        self.new_seqs: list[NewSeq] = []
        self.rows: list[Row] = []
        self.owners: list[Request] = []  # of each row
        self.sampling: list[Request] = []  # of each row that samples: who gets the result's tokens
        self.silent_ends: list[Request] = []  # max_tokens 0: over when this plan is done
        self.num_decode = 0
        self.prompt_tokens = 0  # in chunks
        self.fresh_tokens = 0  # of these, a prompt's, for the first time
        self.repeated_tokens = 0  # of these, computed before and lost in a pause
        self.expected_ms = 0.0
        self.protected_share = 0.0  # share of the decode rows whose pace was heeded
        self._decode_context = 0
        self._prompt_context = 0

    @property
    def shape(self) -> StepShape:
        return StepShape(self.num_decode, self._decode_context, self.prompt_tokens, self._prompt_context)

    @property
    def continues(self) -> bool:
        """Some request of the step before goes on in this one: any wait between the two is lost time."""
        return len(self.new_seqs) < len(self.rows)

    def chunks(self) -> Iterator[tuple[Request, Row]]:
        """The rows of prompts, which come after those of decode."""
        return zip(self.owners[self.num_decode :], self.rows[self.num_decode :], strict=True)

    def as_plan(self) -> StepPlan:
        return StepPlan(step=self.step, new_seqs=self.new_seqs, rows=self.rows)

    def add_decode_rows(self, requests: Sequence[Request], memory: KvMemory) -> list[Request]:
        """One row for each: the hot loop, about 0.3 us a row. Returns those that can need no further row."""
        taken = memory.take(len(requests))
        context = 0
        rows = self.rows
        complete: list[Request] = []
        for request, slot, (packed,) in zip(requests, taken, iter_unpack("4s", taken.tobytes()), strict=True):
            slots = request.slots
            start = len(slots)
            context += start
            rows.append(Row(request.req_slot, start, 1, packed, True))
            slots.append(slot)
            if start + 1 == request.max_kv:
                complete.append(request)
        self.owners.extend(requests)
        self.sampling.extend(requests)
        self.num_decode += len(requests)
        self._decode_context += context
        return complete

    def add_chunk(self, request: Request, count: int, memory: KvMemory, now: float) -> None:
        """The next `count` known tokens of a request; with the first of them, what the worker must know."""
        if not request.announced:
            self._announce(request, now)
        start = len(request.slots)
        taken = memory.take(count)
        request.slots.extend(taken)
        is_last = request.prompt_left == 0
        sample = is_last and request.sampling.max_tokens > 0
        self.rows.append(Row(request.req_slot, start, count, taken.tobytes(), sample))
        self.owners.append(request)
        self.prompt_tokens += count
        self._prompt_context += chunk_context(start, count)
        self._count(request, start, start + count)
        if sample:
            self.sampling.append(request)
        elif is_last:
            self.silent_ends.append(request)

    def _count(self, request: Request, start: int, end: int) -> None:
        self.repeated_tokens += max(min(request.num_lost, end) - start, 0)
        self.fresh_tokens += max(min(end, request.num_prompt) - max(start, request.num_lost), 0)

    def _announce(self, request: Request, now: float) -> None:
        request.announced = True
        if request.first_planned_at is None:
            request.first_planned_at = now
        self.new_seqs.append(
            NewSeq(
                req_slot=request.req_slot,
                token_ids=request.tokens.tobytes(),
                num_prompt=request.num_prompt,
                prefix_slots=request.slots.tobytes(),
                sampling=_sampling(request),
                request_id=request.request_id,
            )
        )


def _sampling(request: Request) -> SamplingParams:
    """As asked for; but no logprobs of a prompt that the client has all of already."""
    if request.sampling.prompt_logprobs is None or not request.is_scored:
        return request.sampling
    return msgspec.structs.replace(request.sampling, prompt_logprobs=None)
