"""Rows with drafts: grants their slots, and accepts the runs of tokens that they return.

KV slots are granted ahead of need, because plan N+1 is built before it is known how many drafts of plan N were
right:

    position   0 .............. num_planned .......... reach ............ len(slots)
               | computed in    | computed if the      | granted to rows
               | any case       | drafts in flight     | whose drafts were
               |                | (`pending_drafts`)   | rejected; reused
               |                | are right            | by later rows

A row starts at a position between `num_planned` and `reach`, which only the worker knows. The position of a rejected
draft is written again, in the same slot, by the next row. The prefix tree and the tiers take only positions before
`num_planned`, and slots return to the pool only when the request leaves.
"""

from __future__ import annotations

from collections.abc import Sequence

from moeserve.messages.schema import TokensItem
from moeserve.messages.steps import Sampled
from moeserve.router.core.memory.sequence_memory import SequenceMemory
from moeserve.router.core.request import Request, State
from moeserve.router.core.steps.scheduled_step import ScheduledStep

Ended = list[tuple[Request, Sampled]]  # (request, entry of the result that ends it)


def add_draft_rows(
    step: ScheduledStep,
    requests: Sequence[Request],
    memory: SequenceMemory,
    lengths: Sequence[int],
    budget: int,
) -> list[Request]:
    """Adds a row for each request, with up to `lengths[i]` drafts, `budget` in all. Returns the requests that need
    no further row. A request gets no row if one in flight may be its last, or if there is no slot for it. The step
    must be empty."""
    left = memory.available - sum(request.lacks_slot for request in requests)
    granted: list[tuple[Request, int, int]] = []  # (request, drafts, slots)
    for request, most in zip(requests, lengths, strict=True):
        reach = request.num_planned + request.pending_drafts
        held, lacks = len(request.slots) - reach, request.lacks_slot
        drafts = min(most, budget, request.max_kv - reach - 1)
        if drafts < 0 or (lacks and left < 0):
            left += lacks
            continue
        drafts = min(drafts, held + lacks + max(left, 0) - 1)
        slots = max(drafts + 1 - held, 0)
        left -= slots - lacks
        budget -= drafts
        granted.append((request, drafts, slots))
    for request, drafts, slots in granted:
        step.add_draft_row(request, drafts, slots, memory)
        request.spare += slots - 1
        request.pending_drafts += drafts
    return [request for request, _, _ in granted if request.need == 0]


def settle(step: ScheduledStep, sampled: Sequence[Sampled]) -> None:
    """Marks the slots of rejected drafts as spare, after the step's result arrived."""
    step.num_drafted = 0
    for request, row, entry in zip(step.owners, step.rows, sampled[: step.num_draft_rows], strict=False):
        accepted = entry.accepted
        if accepted is not None:
            step.num_drafted += accepted.drafted
            request.draft_tokens += accepted.drafted
            request.accepted_draft_tokens += len(accepted.token_ids)
        if request.slots:  # otherwise it was preempted meanwhile
            request.spare -= 0 if accepted is None else len(accepted.token_ids)
            request.pending_drafts -= row.count - 1


def accept_runs(
    owners: Sequence[Request], sampled: Sequence[Sampled], step: int, now: float
) -> tuple[list[TokensItem], Ended]:
    """Appends the sampled tokens of rows that may have drafts, one or more each. Returns the items to send, and the
    requests that end, each with the token entry that ends it. That is the first entry that can end the request, as
    without drafts. now: monotonic seconds."""
    items: list[TokensItem] = []
    ended: Ended = []
    for request, entry in zip(owners, sampled, strict=True):
        if request.state is State.FINISHED or request.stale_through >= step:
            continue
        run = _run(entry)
        last = next((at for at, one in enumerate(run) if _ends(request, one.token_id, at)), len(run))
        if last < len(run):
            ended.append((request, run[last]))
        if last:
            tokens = [one.token_id for one in run[:last]]
            logprobs = [one.logprob for one in run[:last] if one.logprob is not None]
            request.last_token_at = now
            request.num_output += last
            request.tokens.extend(tokens)
            items.append(TokensItem(request.id, tokens, logprobs or None))
    return items, ended


def _run(entry: Sampled) -> list[Sampled]:
    """Returns the row's tokens as single entries."""
    accepted = entry.accepted
    if accepted is None:
        return [entry]
    if accepted.logprobs is None:
        return [entry, *map(Sampled, accepted.token_ids)]
    return [entry, *map(Sampled, accepted.token_ids, accepted.logprobs)]


def _ends(request: Request, token_id: int, ahead: int) -> bool:
    """Returns whether the token, which is `ahead` tokens after the next one, ends the request. A negative token
    does."""
    count = request.num_output + ahead
    return (
        token_id < 0
        or count + 1 == request.max_tokens
        or (token_id in request.stop_ids and count >= request.sampling.min_tokens)
    )
