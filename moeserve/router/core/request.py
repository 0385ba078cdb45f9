"""One request in the router: its scheduling state and times. Its tokens and slots are in `HeldSequence`.

Each field has one writer, named at its declaration. Nothing outside `router.core` writes any of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from moeserve.messages.reasoning import EarlyEnd
from moeserve.messages.sampling import SamplingParams
from moeserve.messages.schema import BACKGROUND_PRIORITY, GenerateRequest, PrefillProgress, Resumed, Usage
from moeserve.router.core.beams.beam_rows import BeamRows
from moeserve.router.core.memory.held import HeldSequence

INT32_BYTES = 4

# One level of priority equals this much waiting time, so an urgent request overtakes but none starves.
SECONDS_PER_PRIORITY = 60.0


class State(Enum):
    """The lifecycle: WAITING -> PREFILL -> DECODE -> ENDING -> FINISHED, and WAITING <-> LOADING.

    Preemption returns a request from PREFILL or DECODE to WAITING. A request whose grammar is not ready for its
    first token becomes POSTPONED, then WAITING again. An abort, error or stop changes any state to FINISHED. A
    request with max_tokens 0 or 1 skips DECODE.
    """

    WAITING = auto()  # queued, new or preempted; holds no slots
    POSTPONED = auto()  # awaits its grammar; holds no slots
    LOADING = auto()  # like WAITING, but not in the queue until pages of its prefix are loaded from a tier
    PREFILL = auto()  # bound to a request slot; some known tokens are not planned yet
    DECODE = auto()  # all known tokens are planned; one row per step
    ENDING = auto()  # its last row is planned; only results are awaited
    FINISHED = auto()  # holds no slots; results of rows in flight are ignored


@dataclass(slots=True)
class DraftRecord:
    """Statistics of one request's drafts. Written by `DraftLength`."""

    right: float = 0.0  # decaying counts of outcomes
    wrong: float = 0.0
    made: float = 1.0  # share of its allowed drafts that the worker makes
    idle: int = 0  # steps since it was last allowed drafts
    is_trial: bool = False  # a trial of it is under way
    # A drafting model has read its text (True), reads it (False), or was not asked to (None).
    is_read: bool | None = None


class Request(HeldSequence):
    """A request, from its arrival to its final message. Equality is identity."""

    __slots__ = (
        "accepted_draft_tokens",
        "age",
        "announced",
        "arrival",
        "cached_tokens",
        "crashed_at",
        "crashes",
        "draft_record",
        "draft_tokens",
        "early_end",
        "fairness_preempted_at",
        "first_planned_at",
        "first_token_at",
        "is_background",
        "is_short",
        "last_token_at",
        "max_kv",
        "max_tokens",
        "num_lost",
        "num_output",
        "num_postponed",
        "num_scored",
        "output_postponed",
        "predicted_output",
        "priority",
        "quantile",
        "req_slot",
        "request_id",
        "resume_after",
        "retry_at",
        "sampling",
        "size",
        "stale_through",
        "state",
        "stop_ids",
        "to_be_tried",
        "wants_progress",
    )

    def __init__(self, message: GenerateRequest) -> None:
        super().__init__(
            message.id,
            message.token_ids,
            len(message.token_ids) // INT32_BYTES,
            tenant=message.key_name,
            salt=message.cache_salt,
            adapter=message.adapter,
        )
        # Constants from the client's message.
        self.sampling: SamplingParams = message.sampling
        self.max_tokens: int = message.sampling.max_tokens
        self.stop_ids: frozenset[int] = frozenset(message.sampling.stop_token_ids)
        self.arrival: float = message.arrival
        self.priority: int = message.priority
        self.is_background: bool = message.priority == BACKGROUND_PRIORITY  # see `background_share.py`
        self.request_id: str = message.context.request_id
        self.wants_progress: bool = message.progress
        # Sort key of seniority, smallest first: arrival shifted by priority, then the unique id.
        self.age: tuple[float, int] = (message.arrival + SECONDS_PER_PRIORITY * message.priority, message.id)
        self.early_end: EarlyEnd | None = message.early_end
        self.spans = message.spans
        if message.beams is not None:
            self.beams = BeamRows(message.beams, message.sampling, self.num_prompt)
        # The most KV slots that it can hold. The last output token is never computed and needs none.
        self.max_kv: int = self.num_prompt + self.width * max(message.sampling.max_tokens - 1, 0)

        # Written by Scheduler; for a beam search by BeamSearches, and by RunningBatch when it restarts.
        self.num_output: int = 0  # sampled tokens, including a stop token; for a beam search, of each beam
        self.num_scored: int = 0  # prompt positions whose logprobs were sent
        self.first_token_at: float = 0.0
        self.last_token_at: float = 0.0

        # Written by `drafted_runs`; see Usage.
        self.draft_tokens: int = 0
        self.accepted_draft_tokens: int = 0

        self.draft_record = DraftRecord()  # written by DraftLength
        self.is_short: bool = (
            True  # False once it was bound as a long prompt (`Pace.is_short`); written by Planner
        )

        # Written by CrashBlame: workers in a row that were lost with a row of it in flight, without a token in between.
        self.crashes: int = 0
        self.crashed_at: int = -1  # num_output at the last of these crashes
        self.to_be_tried: bool = False

        # Written by WaitingQueue.add: tokens to compute before the next token, given the cache at that time.
        self.size: int = 0

        # Written by RunningBatch, which binds, preempts and releases.
        self.state: State = State.WAITING
        self.req_slot: int = -1
        self.cached_tokens: int | None = None  # prompt tokens found in the cache when it was first bound
        self.fairness_preempted_at: int = -1  # num_output when it was last preempted for fairness
        self.num_lost: int = 0  # positions computed before the last preemption
        self.resume_after: int = 0  # last step that may contain a row of it, as of its preemption
        self.num_postponed: int = 0  # number of postponements for the token after `output_postponed` others
        self.output_postponed: int = 0
        self.retry_at: int = 0  # step from which on it is queued again
        self.stale_through: int = 0  # last step whose rows of it continue a token that was replaced

        # Written by ScheduledStep as rows are planned.
        self.announced: bool = False  # its NewSeq is part of a plan already sent
        self.first_planned_at: float | None = None  # time of its first chunk's plan, in seconds

        # Written by AdmissionPolicy; see OutputHistory.predict.
        self.quantile: float = 0.0
        self.predicted_output: int = 0

        if message.resumed is not None:
            self._resume(message.resumed)

    def _resume(self, resumed: Resumed) -> None:
        """Restores the progress that it made under a previous router."""
        self.tokens.frombytes(resumed.token_ids)
        self.num_output = len(self.tokens) - self.num_prompt
        self.num_scored = resumed.num_scored
        self.cached_tokens = resumed.cached_tokens
        if resumed.first_token_at is not None:
            # not known any more, so all times before the first token count as one
            self.first_planned_at = self.arrival
            self.first_token_at = self.last_token_at = resumed.first_token_at

    @property
    def num_beams_due(self) -> int:
        """Rows of a beam search that the next step should have."""
        return len(self.beams.rows) if self.beams is not None and self.beams.is_due else 0

    @property
    def answer_ids(self) -> tuple[int, ...]:
        """Ids of the client requests that it answers."""
        return (self.id,) if self.beams is None else self.beams.choice_ids

    @property
    def req_slots(self) -> list[int]:
        """The request slots that it is bound to."""
        return [self.req_slot] if self.beams is None else self.beams.req_slots

    @property
    def lacks_slot(self) -> bool:
        """True if the next row needs a further KV slot, because the rows in flight may fill all slots that the request
        has."""
        return self.spare == self.pending_drafts

    @property
    def has_stopped(self) -> bool:
        return self.tokens[-1] in self.stop_ids and self.num_output > self.sampling.min_tokens

    def ending_for(self, token_id: int) -> tuple[int, ...]:
        """Returns the tokens that take the place of this stop token, and leave room for one more (`EarlyEnd`)."""
        if self.early_end is None:
            return ()
        ending = self.early_end.ending(token_id, self.tokens[self.num_prompt :])
        return ending if self.num_output + len(ending) < self.max_tokens else ()

    @property
    def prompt_left(self) -> int:
        """Number of known tokens whose KV is not planned yet. After a preemption they include output tokens."""
        return self.target - len(self.slots)

    def without_cut_spans(self, count: int, most: int) -> int:
        """Shortens or lengthens the next chunk, of `count` known tokens, so that it does not end within an embedding
        span: it ends before the span, or after the span if the chunk begins with it. Returns the chunk's number of
        tokens, or 0 if it would be more than `most`."""
        start = len(self.slots)
        for span in self.spans:
            if span.start < start + count < span.end:
                if span.start > start:
                    return span.start - start
                return span.end - start if span.end - start <= most else 0
        return count

    @property
    def until_snapshot_point(self) -> int:
        """Number of known tokens up to the next snapshot point or, without one, to the end of its prefill."""
        return (self.snapshot_points[0][0] if self.snapshot_points else self.target) - len(self.slots)

    @property
    def need(self) -> int:
        """The most KV slots that the request may still need."""
        return self.max_kv - self.num_planned

    @property
    def reuse_limit(self) -> int:
        """Number of leading positions that may come from the cache: all but the last known token, whose logits are
        needed. With prompt logprobs, only positions whose logprobs were sent."""
        most = len(self.tokens) - 1
        if self.sampling.prompt_logprobs is None or self.is_scored:
            return most
        return min(most, self.num_scored)

    @property
    def is_scored(self) -> bool:
        """True if the logprobs of the whole prompt have been sent (the first token has none)."""
        return self.num_scored >= self.num_prompt - 1

    @property
    def is_suspect(self) -> bool:
        """True if it may be the request that crashes the worker: it was in flight at the last crash and has got no
        token since."""
        return self.num_output <= self.crashed_at  # smaller for a beam search that restarted

    @property
    def is_on_trial(self) -> bool:
        """True for a suspect: only one suspect is bound at a time, so that a crash identifies it."""
        return self.to_be_tried and self.is_suspect

    def progress(self, done: int, now: float) -> PrefillProgress:
        """Returns the progress message for a prompt with `done` computed positions. Must be called only after the
        prompt's first chunk was planned. now: monotonic seconds."""
        assert self.first_planned_at is not None
        return PrefillProgress(
            total=self.num_prompt,
            cached=self.cached_tokens or 0,
            done=done,
            ms=max(now - self.first_planned_at, 0.0) * 1e3,
        )

    def usage(self, completion_tokens: int, now: float) -> Usage:
        """Returns the counts and times of the final message. now: time in seconds, which counts as the end of prefill
        for a request that has no token."""
        first_planned_at = now if self.first_planned_at is None else self.first_planned_at
        first_token_at = self.first_token_at or now
        last_token_at = self.last_token_at or first_token_at
        # Clamped, because clock readings of two processes may arrive out of order.
        cached = self.cached_tokens or 0
        from_ram = min(self.tier_tokens.get("ram", 0), cached)
        return Usage(
            prompt_tokens=self.num_prompt,
            completion_tokens=completion_tokens,
            cached_tokens=cached,
            queue_ms=max(first_planned_at - self.arrival, 0.0) * 1e3,
            prefill_ms=max(first_token_at - first_planned_at, 0.0) * 1e3,
            decode_ms=max(last_token_at - first_token_at, 0.0) * 1e3,
            disk_tokens=min(self.tier_tokens.get("disk", 0), cached - from_ram),
            ram_tokens=from_ram,
            draft_tokens=self.draft_tokens,
            accepted_draft_tokens=self.accepted_draft_tokens,
        )
