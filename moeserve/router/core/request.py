"""One request as the router sees it: its state, its limits and the slots it holds.

Every field has one writer, named at the field. "Scheduler" is `scheduler.Scheduler`; nothing outside
`router.core` writes any of them.
"""

from __future__ import annotations

from array import array
from enum import Enum, auto

from moeserve.messages.schema import GenerateRequest, SamplingParams, Usage

INT32_BYTES = 4


class State(Enum):
    """WAITING -> PREFILL -> DECODE -> ENDING -> FINISHED; any state may go to FINISHED at once (abort, error,
    stop), and a request of which no token (max_tokens 0) or one token is wanted skips DECODE."""

    WAITING = auto()  # queued; holds nothing
    PREFILL = auto()  # bound to a request slot; part of its prompt is not planned yet
    DECODE = auto()  # its whole prompt is planned; takes one row a step
    ENDING = auto()  # every row it can need is planned; only results are awaited
    FINISHED = auto()  # holds nothing; its rows in flight are ignored


class Request:
    """A request and its bookkeeping. Compared by identity; lives until its final message."""

    __slots__ = (
        "announced",
        "first_planned_at",
        "first_token_at",
        "id",
        "key",
        "last_token_at",
        "max_kv",
        "num_output",
        "num_prompt",
        "req_slot",
        "sampling",
        "slots",
        "state",
        "stop_ids",
        "token_ids",
    )

    def __init__(self, message: GenerateRequest) -> None:
        # Fixed by the client's message.
        self.id: int = message.id
        self.token_ids: bytes = message.token_ids  # the prompt, int32
        self.num_prompt: int = len(message.token_ids) // INT32_BYTES
        self.sampling: SamplingParams = message.sampling
        self.stop_ids: frozenset[int] = frozenset(message.sampling.stop_token_ids)
        # Order in every queue: priority (lower first), then arrival, then id so that no two compare equal.
        self.key: tuple[int, float, int] = (message.priority, message.arrival, message.id)
        # Most KV slots it can ever hold. The last token is only ever output, never computed: no slot for it.
        self.max_kv: int = self.num_prompt + max(message.sampling.max_tokens - 1, 0)

        # Written by Scheduler on every event that moves the request.
        self.state: State = State.WAITING

        # Written by Scheduler when it admits the request and when it releases it.
        self.req_slot: int = -1

        # Written by Scheduler.plan (in flight.py). KV slots by position: positions 0 .. len(slots)-1 are in
        # plans already sent.
        self.slots: array[int] = array("i")
        self.announced: bool = False  # its NewSeq is in a plan already sent
        self.first_planned_at: float = 0.0  # seconds, when the first chunk was planned

        # Written by Scheduler.step_result.
        self.num_output: int = 0  # tokens sampled, a stop token included
        self.first_token_at: float = 0.0
        self.last_token_at: float = 0.0

    @property
    def prompt_left(self) -> int:
        """Prompt tokens not planned yet."""
        return self.num_prompt - len(self.slots)

    @property
    def need(self) -> int:
        """KV slots it may still ask for."""
        return self.max_kv - len(self.slots)

    def usage(self, completion_tokens: int, now: float) -> Usage:
        """What the final message tells the client. `now` ends the prefill of a request without a token."""
        first_token_at = self.first_token_at or now
        last_token_at = self.last_token_at or first_token_at
        # Clamped: two readings of the clock in two processes may be taken in one order and arrive in another.
        return Usage(
            prompt_tokens=self.num_prompt,
            completion_tokens=completion_tokens,
            cached_tokens=0,
            queue_ms=max(self.first_planned_at - self.key[1], 0.0) * 1e3,
            prefill_ms=max(first_token_at - self.first_planned_at, 0.0) * 1e3,
            decode_ms=max(last_token_at - first_token_at, 0.0) * 1e3,
        )
