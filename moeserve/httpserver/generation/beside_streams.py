"""Work that is too long for the event loop runs on a thread, in pieces, so that streams continue between two pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, ParamSpec, TypeVar

from moeserve.messages.sampling import TokenLogprob
from moeserve.messages.schema import TextItem

VALUES_AT_ONCE: Final = (
    2000  # values of an answer: writing them takes 2 ms, handing them to a thread a tenth of that
)

P = ParamSpec("P")
T = TypeVar("T")


async def beside_streams(values: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns the result of `work`, which writes about `values` values of an answer (tokens, log-probabilities). More
    than VALUES_AT_ONCE are written on a thread."""
    if values <= VALUES_AT_ONCE:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


def values_of(answers: Sequence[Sequence[TextItem]]) -> int:
    """Returns the number of values in the answers: tokens, and log-probabilities of answers and prompts."""
    return sum(
        len(item.token_ids) + _entries(item.logprobs) + _entries(item.prompt_logprobs)
        for items in answers
        for item in items
    )


def _entries(tokens: Sequence[TokenLogprob] | None) -> int:
    return len(tokens) * (1 + len(tokens[0].top_ids)) if tokens else 0
