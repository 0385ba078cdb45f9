"""A step plan while it is built and while it is in flight: its rows and their requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from moeserve.messages.pages import PageOrders
from moeserve.messages.sampling import SamplingParams
from moeserve.messages.steps import CONTINUES, Fork, NewSeq, Row, StepPlan
from moeserve.router.core.memory.sequence_memory import SequenceMemory
from moeserve.router.core.policy.step_cost import StepShape, chunk_context
from moeserve.router.core.request import Request


class ScheduledStep:
    """The rows of a step: written while the step is planned, read when its result arrives. Adding a row allocates its
    KV slots, which the memory appends to the request, so that every row has slots."""

    __slots__ = (
        "_decode_context",
        "_prompt_context",
        "at_snapshot_point",
        "charged_share",
        "draft_tokens",
        "expected_ms",
        "forks",
        "fresh_tokens",
        "has_background",
        "keeps_block",
        "new_seqs",
        "num_decode",
        "num_draft_rows",
        "num_drafted",
        "owners",
        "pages",
        "prompt_span",
        "prompt_tokens",
        "repeated_tokens",
        "rows",
        "sampling",
        "searches",
        "silent_ends",
        "state_copies",
        "step",
    )

    def __init__(self, step: int) -> None:
        self.step = step
        self.new_seqs: list[NewSeq] = []
        self.rows: list[Row] = []
        self.owners: list[Request] = []  # request of each row
        # request of each row that samples, in the order of the result's tokens
        self.sampling: list[Request] = []
        self.searches: dict[Request, range] = {}  # beam search → its range in `sampling`
        self.forks: list[Fork] = []
        self.silent_ends: list[Request] = []  # requests with max_tokens 0, which end with this step
        self.state_copies = b""  # StepPlan.state_copies; written by Planner
        self.pages: PageOrders | None = None  # StepPlan.pages; written by Planner
        self.keeps_block = True  # StepPlan.keeps_block; written by Planner
        self.at_snapshot_point: set[Request] = (
            set()
        )  # prompts that continue in a later step, after a snapshot
        self.num_decode = 0
        self.num_draft_rows = 0  # number of leading rows that may have drafts (start is CONTINUES)
        self.draft_tokens = 0  # drafts allowed in these rows
        self.num_drafted = 0  # drafts that the worker makes: expected, then from its result
        self.prompt_tokens = 0  # tokens in chunks, including recomputed output
        self.fresh_tokens = 0  # of these, prompt tokens computed for the first time
        self.repeated_tokens = 0  # of these, tokens computed before a preemption
        self.expected_ms = 0.0  # predicted duration of the whole step
        self.has_background = False  # it has rows of background requests; written by Planner
        self.charged_share = 0.0  # share of its stall that its prompts owe to answers; written by Planner
        self._decode_context = 0
        self._prompt_context = 0
        self.prompt_span = 0  # end position of the farthest chunk

    @property
    def described(self) -> str:
        """Returns a description for a log line."""
        return (
            f"in step {self.step} of {self.num_decode} decode rows, {len(self.rows) - self.num_decode} prompts with "
            f"{self.prompt_tokens} tokens"
        )

    @property
    def num_tokens(self) -> int:
        """Upper limit of the step's tokens."""
        return self.num_decode + self.draft_tokens + self.prompt_tokens

    @property
    def shape(self) -> StepShape:
        prompts = (self.prompt_tokens, self._prompt_context, self.prompt_span)
        return StepShape(self.num_decode + self.num_drafted, self._decode_context, *prompts)

    @property
    def shape_of_others(self) -> StepShape:
        """The step's shape (`StepShape`) without the rows of background requests."""
        if not any(request.is_background for request in self.owners):
            return self.shape
        decode = [one for one in self.owners[: self.num_decode] if not one.is_background]
        context = sum(request.num_planned for request in decode)
        prompt, prompt_context, span = 0, 0, 0
        for request, row in self.chunks():
            if not request.is_background:
                prompt += row.count
                prompt_context += chunk_context(row.start, row.count)
                span = max(span, row.start + row.count)
        drafted = self.num_drafted * len(decode) // max(self.num_decode, 1)
        return StepShape(len(decode) + drafted, context, prompt, prompt_context, span)

    @property
    def continues(self) -> bool:
        """True if a request of the previous step continues in this one, so that idle time between the two is lost."""
        return len(self.new_seqs) < len(self.rows)

    def chunks(self) -> Iterator[tuple[Request, Row]]:
        """Yields the prompt rows, which follow the decode rows."""
        return zip(self.owners[self.num_decode :], self.rows[self.num_decode :], strict=True)

    def as_plan(self) -> StepPlan:
        orders = self.state_copies, self.pages, self.forks
        return StepPlan(self.step, self.new_seqs, self.rows, *orders, keeps_block=self.keeps_block)

    def add_decode_rows(self, requests: Sequence[Request], memory: SequenceMemory) -> list[Request]:
        """Adds one decode row per request. Returns the requests that need no further row.

        This loop takes some 0.3 us per row.
        """
        context = 0
        rows = self.rows
        complete: list[Request] = []
        for request, (packed, window) in zip(requests, memory.grant_each(requests), strict=True):
            end = len(request.slots)
            context += end - 1
            rows.append(Row(request.req_slot, end - 1, 1, packed, True, window))
            if end == request.max_kv:
                complete.append(request)
        self.owners.extend(requests)
        self.sampling.extend(requests)
        self.num_decode += len(requests)
        self._decode_context += context
        return complete

    def add_draft_row(self, request: Request, drafts: int, slots: int, memory: SequenceMemory) -> None:
        """Adds a row with up to `drafts` drafts, granted `slots` positions. Such rows come before all others."""
        self._decode_context += request.num_planned
        granted = memory.grant(request, slots)
        self.rows.append(Row(request.req_slot, CONTINUES, 1 + drafts, granted.kv, True, granted.window))
        self.owners.append(request)
        self.sampling.append(request)
        self.num_decode += 1
        self.num_draft_rows += 1
        self.draft_tokens += drafts

    def add_beam_rows(self, request: Request, memory: SequenceMemory) -> None:
        """Adds a row for each beam of a search, and needs one slot per row. They follow the decode rows and precede
        chunks."""
        beams = request.beams
        assert beams is not None
        forks, slots = memory.grant_beams(request)
        self.forks += forks
        for row, (packed, window) in zip(beams.rows, slots, strict=True):
            self.rows.append(Row(row.req_slot, beams.position, 1, packed, True, window))
        first, count = len(self.sampling), len(beams.rows)
        self.searches[request] = range(first, first + count)
        self.owners += [request] * count
        self.sampling += [request] * count
        self.num_decode += count
        self._decode_context += count * beams.position

    def add_chunk(self, request: Request, count: int, memory: SequenceMemory, now: float) -> None:
        """Adds the next `count` known tokens of a request; its first chunk also adds the NewSeq that binds it. now:
        monotonic seconds."""
        if not request.announced:
            self._announce(request, now)
        start = len(request.slots)
        granted = memory.grant(request, count)
        is_last = request.prompt_left == 0
        sample = is_last and request.sampling.max_tokens > 0
        self.rows.append(Row(request.req_slot, start, count, granted.kv, sample, granted.window))
        self.owners.append(request)
        self.prompt_tokens += count
        self._prompt_context += chunk_context(start, count)
        self.prompt_span = max(self.prompt_span, start + count)
        self._count(request, start, start + count)
        if sample:
            if request.beams is not None:
                self.searches[request] = range(len(self.sampling), len(self.sampling) + 1)
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
        seq = NewSeq(
            req_slot=request.req_slot,
            token_ids=request.tokens.tobytes(),
            num_prompt=request.num_prompt,
            prefix_slots=request.slots.tobytes(),
            sampling=_sampling(request),
            request_id=request.request_id,
            state_slot=request.state_slot,
            prefix_window_slots=request.window_slots.tobytes(),
            adapter=request.adapter,
            tenant=request.tenant,
            namespace="\0".join(request.namespace(isolate_tenants=True)),
            spans=[span for span in request.spans if span.end > len(request.slots) or span.positions],
        )
        self.new_seqs.append(seq)
        nothing = {"token_ids": b"", "num_prompt": 0, "prefix_slots": b"", "prefix_window_slots": b""}
        empty = msgspec.structs.replace(seq, **nothing)
        # The other beams' request slots; forks give them their tokens.
        for req_slot, state_slot in zip(request.req_slots[1:], request.state_slots[1:], strict=True):
            self.new_seqs.append(msgspec.structs.replace(empty, req_slot=req_slot, state_slot=state_slot))


def _sampling(request: Request) -> SamplingParams:
    """Returns the request's sampling parameters, without prompt logprobs if the client has all of them. For beams
    the worker returns their top tokens."""
    if request.beams is not None:
        wanted = max(request.beams.search.num_candidates, request.sampling.logprobs or 0)
        of = request.sampling
        return SamplingParams(of.max_tokens, temperature=0.0, seed=of.seed, logprobs=wanted)
    if request.sampling.prompt_logprobs is None or not request.is_scored:
        return request.sampling
    return msgspec.structs.replace(request.sampling, prompt_logprobs=None)
