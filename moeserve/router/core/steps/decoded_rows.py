"""Accepts the tokens of rows without drafts."""

from __future__ import annotations

from collections.abc import Sequence

from moeserve.messages.schema import TokensItem
from moeserve.messages.steps import Sampled
from moeserve.router.core.memory.sequence_memory import SequenceMemory
from moeserve.router.core.request import Request, State
from moeserve.router.core.steps.drafted_runs import Ended


def accept_rows(
    owners: Sequence[Request], sampled: Sequence[Sampled], step: int, now: float, memory: SequenceMemory
) -> tuple[list[TokensItem], Ended]:
    """Appends a token to each request that goes on. A request that was preempted since its row was planned gets its
    token, too. Rows of finished requests, and rows that continue a token that was replaced, are skipped. Returns the
    items to send, and the requests that end, each with the entry that ends it. The hot loop: some 0.3 us per row."""
    items: list[TokensItem] = []
    ended: Ended = []
    for request, entry in zip(owners, sampled, strict=True):
        if request.state is State.FINISHED or request.beams is not None or request.stale_through >= step:
            continue  # a stale row (see `Scheduler` and `Request.stale_through`), or a beam
        token_id = entry.token_id
        count = request.num_output
        if (
            token_id < 0
            or count + 1 == request.max_tokens
            or (token_id in request.stop_ids and count >= request.sampling.min_tokens)
        ):
            ended.append((request, entry))
            continue
        logprobs = None if entry.logprob is None else [entry.logprob]
        if count:
            items.append(TokensItem(request.id, [token_id], logprobs))
        else:
            request.first_token_at = now
            memory.save(request)
            items.append(TokensItem(request.id, [token_id], logprobs, cached_tokens=request.cached_tokens))
        request.last_token_at = now
        request.num_output = count + 1
        request.tokens.append(token_id)
    return items, ended
