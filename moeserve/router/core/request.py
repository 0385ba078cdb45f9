"""One request as the router sees it: its state, its tokens and the slots that it holds.

Every field has one writer, named where it is declared. Nothing outside `router.core` writes any of them.
"""

from __future__ import annotations

from array import array
from enum import Enum, auto
from typing import TYPE_CHECKING

from moeserve.messages.pages import Tier
from moeserve.messages.sampling import SamplingParams
from moeserve.messages.schema import GenerateRequest, PrefillProgress, Resumed, Usage
from moeserve.router.core.beams.beam_rows import BeamRows

if TYPE_CHECKING:
    from moeserve.router.core.memory.radix_node import Node
    from moeserve.router.core.memory.snapshot_points import Border

INT32_BYTES = 4

# One level of priority counts as much as this much waiting, so that an urgent request overtakes but none starves.
SECONDS_PER_PRIORITY = 60.0


class State(Enum):
    """WAITING -> PREFILL -> DECODE -> ENDING -> FINISHED, where WAITING may lead to LOADING and back.

    Preemption leads from PREFILL or DECODE back to WAITING. A request whose grammar is not ready for its first token
    becomes POSTPONED, and then WAITING again. Any state may change to FINISHED at once (abort, error,
    stop). A request with max_tokens 0 or 1 skips DECODE.
    """

    WAITING = auto()  # queued, new or preempted; holds no slots
    POSTPONED = auto()  # awaits its grammar; holds no slots
    LOADING = auto()  # as WAITING, out of the queue until pages of it are loaded from a tier
    PREFILL = auto()  # bound to a request slot; some of its known tokens are not planned yet
    DECODE = auto()  # all its known tokens are planned; one row in each step
    ENDING = auto()  # its last row is planned; only results are awaited
    FINISHED = auto()  # holds no slots; results of its rows in flight are ignored


class Request:
    """A request and its bookkeeping, until its final message. Compared by identity."""

    __slots__ = (
        "adapter",
        "age",
        "announced",
        "arrival",
        "beams",
        "borders",
        "borrowed",
        "cache_salt",
        "cached_tokens",
        "crashed_at",
        "crashes",
        "fairness_preempted_at",
        "first_planned_at",
        "first_token_at",
        "id",
        "last_token_at",
        "max_kv",
        "max_tokens",
        "node",
        "num_lost",
        "num_output",
        "num_postponed",
        "num_prompt",
        "num_scored",
        "num_shared",
        "output_postponed",
        "pending_drafts",
        "predicted_output",
        "priority",
        "quantile",
        "req_slot",
        "request_id",
        "resume_after",
        "retry_at",
        "sampling",
        "size",
        "slots",
        "spare",
        "state",
        "state_slot",
        "stop_ids",
        "target",
        "tenant",
        "tier_tokens",
        "tiers_were_asked",
        "to_be_tried",
        "tokens",
        "wants_progress",
        "window_borders",
        "window_first",
        "window_slots",
    )

    def __init__(self, message: GenerateRequest) -> None:
        # Constant, from the client's message.
        self.id: int = message.id
        self.num_prompt: int = len(message.token_ids) // INT32_BYTES
        self.sampling: SamplingParams = message.sampling
        self.max_tokens: int = message.sampling.max_tokens
        self.stop_ids: frozenset[int] = frozenset(message.sampling.stop_token_ids)
        self.arrival: float = message.arrival
        self.priority: int = message.priority
        self.tenant: str = message.key_name
        self.request_id: str = message.context.request_id
        self.cache_salt: str = message.cache_salt  # only requests with the same salt share its prefix
        self.adapter: str = message.adapter  # whose KV and state are the adapter's own
        self.wants_progress: bool = message.progress
        # Sort key of seniority, smallest first: arrival moved by priority, then the id, which makes it unique.
        self.age: tuple[float, int] = (message.arrival + SECONDS_PER_PRIORITY * message.priority, message.id)
        # A beam search: its output is there, its `tokens` and `slots` are the prompt's alone.
        self.beams: BeamRows | None = None
        if message.beams is not None:
            self.beams = BeamRows(message.beams, message.sampling, self.num_prompt)
        # The most KV slots that it can hold. The last output token is never computed and needs none.
        self.max_kv: int = self.num_prompt + self.width * max(message.sampling.max_tokens - 1, 0)

        # Written by Scheduler; of a beam search, by BeamSearches, and by RunningBatch where it begins again. `tokens`
        # is the prompt, then each output token as its result arrives.
        self.tokens: array[int] = array("i", message.token_ids)
        self.num_output: int = 0  # tokens sampled, a stop token included; of a beam search, of each beam
        self.num_scored: int = 0  # prompt positions whose logprobs were sent
        self.first_token_at: float = 0.0
        self.last_token_at: float = 0.0

        # Written by CrashBlame.
        # Workers in a row that were lost with a row of it in flight, and no token in between.
        self.crashes: int = 0
        self.crashed_at: int = -1  # num_output at the last of them
        self.to_be_tried: bool = False

        # Written by WaitingQueue.add: tokens to compute before the next token, as the cache stood then.
        self.size: int = 0

        # Written by RunningBatch, which binds, preempts and releases.
        self.state: State = State.WAITING
        self.req_slot: int = -1
        self.target: int = 0  # number of tokens known when it was bound: prefill ends there
        self.cached_tokens: int | None = None  # prompt tokens found in the cache when it was first bound
        self.fairness_preempted_at: int = -1  # num_output when it was last preempted for fairness
        self.num_lost: int = 0  # positions that were computed before the last preemption
        self.resume_after: int = 0  # the last step that may have a row of it, as of its preemption
        self.num_postponed: int = 0  # times, for the token behind `output_postponed` others
        self.output_postponed: int = 0
        self.retry_at: int = 0  # the step from which on it is queued again

        # Written by KvMemory. `slots` has the KV slots by position: positions 0 .. num_planned-1 are in plans already
        # sent or were found in the cache, and beyond there are slots for drafts. The first num_shared of them belong
        # to the prefix tree, on the path to `node`.
        self.slots: array[int] = array("i")
        self.num_shared: int = 0
        self.node: Node | None = None
        self.borrowed: int = 0  # slots found in the cache that other running requests held then

        # Written by SnapshotTaker. Positions beyond len(slots) where a chunk ends, so that a snapshot can be taken;
        # ascending.
        self.borders: list[Border] = []

        # Written by PageTiers, and `tiers_were_asked` by RunningBatch, too.
        self.tiers_were_asked: bool = False  # whether pages in RAM or on disk continue it, since it waits
        self.tier_tokens: dict[Tier, int] = {}  # loaded for it

        # Written by StateMemory. The slot's state is that after positions 0 .. num_planned-1, once the plans sent so
        # far are executed, and after the drafts that they accept. -1: none, where it does not run or the model has no
        # recurrent state.
        self.state_slot: int = -1

        # Written by WindowMemory, of a model whose windowed layers have a KV pool of their own: that pool's slots of
        # positions window_first .. len(slots)-1, and where islands of them are to be kept, ascending.
        self.window_slots: array[int] = array("i")
        self.window_first: int = 0
        self.window_borders: list[Border] = []

        # Written by ScheduledStep as rows are planned.
        self.announced: bool = False  # its NewSeq is in a plan already sent
        self.first_planned_at: float | None = None  # seconds, when the first chunk was planned
        # Of rows with drafts; KvMemory zeroes both as it takes the slots.
        self.spare: int = 0  # slots beyond num_planned
        self.pending_drafts: int = 0  # that its rows in flight may accept

        # Written by AdmissionPolicy; see OutputHistory.predict.
        self.quantile: float = 0.0
        self.predicted_output: int = 0

        if message.resumed is not None:
            self._resume(message.resumed)

    def _resume(self, resumed: Resumed) -> None:
        """Another router has served it so far."""
        self.tokens.frombytes(resumed.token_ids)
        self.num_output = len(self.tokens) - self.num_prompt
        self.num_scored = resumed.num_scored
        self.cached_tokens = resumed.cached_tokens
        if resumed.first_token_at is not None:
            self.first_planned_at = self.arrival  # unknown by now: the times before the first token are one
            self.first_token_at = self.last_token_at = resumed.first_token_at

    @property
    def width(self) -> int:
        """Request slots that it takes, and most rows of it in a step."""
        return 1 if self.beams is None else self.beams.width

    @property
    def num_beams_due(self) -> int:
        """Rows of a beam search that the next step should have."""
        return len(self.beams.rows) if self.beams is not None and self.beams.is_due else 0

    @property
    def answer_ids(self) -> tuple[int, ...]:
        """The clients' requests that it answers."""
        return (self.id,) if self.beams is None else self.beams.choice_ids

    @property
    def req_slots(self) -> list[int]:
        """That it is bound to."""
        return [self.req_slot] if self.beams is None else self.beams.req_slots

    @property
    def state_slots(self) -> list[int]:
        """Of each of its request slots."""
        return [self.state_slot] if self.beams is None else [self.state_slot, *self.beams.more_state_slots]

    @property
    def num_slots(self) -> int:
        """KV slots that it holds."""
        return len(self.slots) if self.beams is None else len(self.slots) + self.beams.num_slots

    @property
    def next_position(self) -> int:
        """Of its next row; of its next rows, where it is a beam search."""
        if self.beams is None or not self.beams.search.length:
            return self.num_planned
        return self.beams.position + (not self.beams.is_due)

    @property
    def num_planned(self) -> int:
        """Positions that the plans sent so far compute for certain, where none of their rows' drafts is accepted."""
        return len(self.slots) - self.spare

    @property
    def lacks_slot(self) -> bool:
        """Its next row needs a KV slot: its rows in flight may fill all that it has."""
        return self.spare == self.pending_drafts

    @property
    def has_stopped(self) -> bool:
        """Its last token is one that ends it."""
        return self.tokens[-1] in self.stop_ids and self.num_output > self.sampling.min_tokens

    @property
    def prompt_left(self) -> int:
        """Known tokens whose KV is not planned yet. After a preemption they include output tokens."""
        return self.target - len(self.slots)

    @property
    def until_border(self) -> int:
        """Known tokens up to the next border or, without one, to the end of its prefill."""
        return (self.borders[0][0] if self.borders else self.target) - len(self.slots)

    @property
    def need(self) -> int:
        """KV slots that it may still take."""
        return self.max_kv - self.num_planned

    @property
    def reuse_limit(self) -> int:
        """How many leading positions may come from the cache: all but the last known token, whose logits are needed.
        With prompt logprobs, only the positions whose logprobs have been sent."""
        most = len(self.tokens) - 1
        if self.sampling.prompt_logprobs is None or self.is_scored:
            return most
        return min(most, self.num_scored)

    @property
    def is_scored(self) -> bool:
        """The logprobs of the whole prompt have been sent (the first token has none)."""
        return self.num_scored >= self.num_prompt - 1

    @property
    def is_suspect(self) -> bool:
        """It may be what crashes the worker: it was there at the last crash, and has got no token since."""
        return self.num_output <= self.crashed_at  # below: a beam search that began again

    @property
    def is_on_trial(self) -> bool:
        """Only one such request is bound at a time, until its next token, so that a crash shows which it is."""
        return self.to_be_tried and self.is_suspect

    def progress(self, done: int, now: float) -> PrefillProgress:
        """The message for a prompt of which `done` positions are computed. Only after its first chunk was planned."""
        assert self.first_planned_at is not None
        return PrefillProgress(
            total=self.num_prompt,
            cached=self.cached_tokens or 0,
            done=done,
            ms=max(now - self.first_planned_at, 0.0) * 1e3,
        )

    def usage(self, completion_tokens: int, now: float) -> Usage:
        """The final message's counts and times. `now` ends the prefill of a request that has no token."""
        first_planned_at = now if self.first_planned_at is None else self.first_planned_at
        first_token_at = self.first_token_at or now
        last_token_at = self.last_token_at or first_token_at
        # Clamped, because readings of the clock in two processes may arrive out of order.
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
        )
