"""What an engine that tests script says to httpserver."""

from __future__ import annotations

from moeserve.messages.sampling import TokenLogprob
from moeserve.messages.schema import EngineReady
from moeserve.messages.steps import WorkerReady

CONTEXT = 512


def ready_message(vocab_size: int, slots: int | None = None, context: int = CONTEXT) -> EngineReady:
    slots = 4 * context if slots is None else slots
    return EngineReady(WorkerReady(slots, 8, context, vocab_size, 0, 0, "a test"))


def logprobs_of(token_id: int, top: int) -> TokenLogprob:
    """The token itself is most likely, then the ids that follow it."""
    ids, logprobs = (token_id + i for i in range(top)), (-0.5 - i for i in range(top))
    return TokenLogprob(token_id, -0.5, 1, tuple(ids), tuple(logprobs))
