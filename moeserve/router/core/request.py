"""One request as the router sees it: its state, its tokens and the slots it holds.

Every field has one writer, named at the field; nothing outside `router.core` writes any of them.
"""

from __future__ import annotations

from array import array
from enum import Enum, auto
from typing import TYPE_CHECKING

from moeserve.messages.schema import GenerateRequest, PromptProgress, SamplingParams, Usage

if TYPE_CHECKING:
    from moeserve.router.core.radix_cache import Node

INT32_BYTES = 4

# One level of priority outweighs so much waiting: an urgent request passes, but nothing waits for ever.
SECONDS_PER_PRIORITY = 60.0


class State(Enum):
    """WAITING -> PREFILL -> DECODE -> ENDING -> FINISHED.

    A pause leads from PREFILL or DECODE back to WAITING. Any state may go to FINISHED at once (abort, error,
    stop), and a request of which no token (max_tokens 0) or one token is wanted skips DECODE.
    """

    WAITING = auto()  # queued, new or paused; holds nothing
    PREFILL = auto()  # bound to a request slot; some of its known tokens are not planned yet
    DECODE = auto()  # all its known tokens are planned; takes one row a step
    ENDING = auto()  # every row it can need is planned; only results are awaited
    FINISHED = auto()  # holds nothing; its rows in flight are ignored


class Request:
    """A request and its bookkeeping. Compared by identity; lives until its final message."""

    __slots__ = (
        "age",
        "announced",
        "arrival",
        "borrowed",
        "cache_salt",
        "cached_tokens",
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
        "num_prompt",
        "num_scored",
        "num_shared",
        "predicted_output",
        "priority",
        "quantile",
        "req_slot",
        "request_id",
        "resume_after",
        "sampling",
        "size",
        "slots",
        "state",
        "stop_ids",
        "target",
        "tenant",
        "tokens",
        "wants_progress",
    )

    def __init__(self, message: GenerateRequest) -> None:
        # Fixed by the client's message.
        self.id: int = message.id
        self.num_prompt: int = len(message.token_ids) // INT32_BYTES
        self.sampling: SamplingParams = message.sampling
        self.max_tokens: int = message.sampling.max_tokens
        self.stop_ids: frozenset[int] = frozenset(message.sampling.stop_token_ids)
        self.arrival: float = message.arrival
        self.priority: int = message.priority
        self.tenant: str = message.key_name
        self.request_id: str = message.context.request_id
        self.cache_salt: str = message.cache_salt  # its prompt is found by those with the same salt only
        self.wants_progress: bool = message.progress
        # Seniority, smallest first: arrival moved by priority, then id so that no two compare equal.
        self.age: tuple[float, int] = (message.arrival + SECONDS_PER_PRIORITY * message.priority, message.id)
        # Most KV slots it can ever hold. The last token is only ever output, never computed: no slot for it.
        self.max_kv: int = self.num_prompt + max(message.sampling.max_tokens - 1, 0)

        # Written by Scheduler: the prompt, then each token as its result comes.
        self.tokens: array[int] = array("i", message.token_ids)
        self.num_output: int = 0  # tokens sampled, a stop token included
        self.num_scored: int = 0  # prompt positions whose logprobs the client has
        self.first_token_at: float = 0.0
        self.last_token_at: float = 0.0

        # Written by WaitingQueue.add: tokens to compute before the next token, as the cache stood then.
        self.size: int = 0

        # Written by RunningBatch, which also binds, pauses and releases.
        self.state: State = State.WAITING
        self.req_slot: int = -1
        self.target: int = 0  # tokens known when it was bound: those that prefill must compute
        self.cached_tokens: int | None = None  # prompt tokens found in the cache when it was bound first
        self.fairness_preempted_at: int = -1  # num_output when it was last paused to make way for another key
        self.num_lost: int = 0  # positions that were computed before the last pause
        self.resume_after: int = 0  # the last step that may have had a row of it when it was paused

        # Written by KvMemory. KV slots by position: positions 0 .. len(slots)-1 are in plans already sent, or
        # were found in the cache. The first num_shared of them belong to the tree, down to `node`.
        self.slots: array[int] = array("i")
        self.num_shared: int = 0
        self.node: Node | None = None
        self.borrowed: int = 0  # of those found in the cache, the ones that others held at the time

        # Written by ScheduledStep as rows are planned.
        self.announced: bool = False  # its NewSeq is in a plan already sent
        self.first_planned_at: float | None = None  # seconds, when the first chunk was planned

        # Written by AdmissionPolicy; see OutputHistory.predict.
        self.quantile: float = 0.0
        self.predicted_output: int = 0

    @property
    def prompt_left(self) -> int:
        """Known tokens whose KV is not planned yet; after a pause, output counts like prompt."""
        return self.target - len(self.slots)

    @property
    def need(self) -> int:
        """KV slots it may still ask for."""
        return self.max_kv - len(self.slots)

    @property
    def reuse_limit(self) -> int:
        """How many leading positions may come from the cache: all but the last known token, whose logits are
        wanted; and where the prompt's logprobs are wanted, only those already delivered."""
        most = len(self.tokens) - 1
        if self.sampling.prompt_logprobs is None or self.is_scored:
            return most
        return min(most, self.num_scored)

    @property
    def is_scored(self) -> bool:
        """The client has the logprobs of the whole prompt (whose first token has none)."""
        return self.num_scored >= self.num_prompt - 1

    def progress(self, done: int, now: float) -> PromptProgress:
        """When positions up to `done` are computed, at least one of them by a plan."""
        assert self.first_planned_at is not None
        return PromptProgress(
            total=self.num_prompt,
            cached=self.cached_tokens or 0,
            done=done,
            ms=max(now - self.first_planned_at, 0.0) * 1e3,
        )

    def usage(self, completion_tokens: int, now: float) -> Usage:
        """What the final message tells the client. `now` ends the prefill of a request without a token."""
        first_planned_at = now if self.first_planned_at is None else self.first_planned_at
        first_token_at = self.first_token_at or now
        last_token_at = self.last_token_at or first_token_at
        # Clamped: two readings of the clock in two processes may be taken in one order and arrive in another.
        return Usage(
            prompt_tokens=self.num_prompt,
            completion_tokens=completion_tokens,
            cached_tokens=self.cached_tokens or 0,
            queue_ms=max(first_planned_at - self.arrival, 0.0) * 1e3,
            prefill_ms=max(first_token_at - first_planned_at, 0.0) * 1e3,
            decode_ms=max(last_token_at - first_token_at, 0.0) * 1e3,
        )
