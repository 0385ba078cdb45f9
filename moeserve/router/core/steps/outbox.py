"""Messages waiting to be sent to the detokenizer, in order of the events."""

from __future__ import annotations

from collections.abc import Iterable

from moeserve.messages.sampling import TokenLogprob
from moeserve.messages.schema import (
    DetokenizeEnd,
    DetokenizeStart,
    RequestError,
    TokensItem,
    TokensOut,
)
from moeserve.messages.steps import Row
from moeserve.router.core.request import Request, State

RouterMessage = DetokenizeStart | DetokenizeEnd | TokensOut | RequestError


class Outbox:
    def __init__(self) -> None:
        self._messages: list[RouterMessage] = []

    def put(self, messages: Iterable[RouterMessage]) -> None:
        self._messages += messages

    def emit(self, items: list[TokensItem]) -> None:
        """Adds the item to the last message if that is a TokensOut, so that a step sends a single message."""
        if not items:
            return
        last = self._messages[-1] if self._messages else None
        if isinstance(last, TokensOut):
            last.items.extend(items)
        else:
            self._messages.append(TokensOut(items=items))

    def take(self) -> list[RouterMessage]:
        """Returns all messages since the last call, in order."""
        messages, self._messages = self._messages, []
        return messages

    def emit_prompt_logprobs(self, owner: Request, start: int, logprobs: list[TokenLogprob]) -> None:
        """Adds the logprobs of prompt positions from `start` on, except those sent before a preemption."""
        if owner.state is State.FINISHED:
            return
        new = logprobs[owner.num_scored - start :]
        owner.num_scored += len(new)
        if new:
            self.emit([TokensItem(owner.id, [], prompt_logprobs=new)])

    def emit_progress(self, chunks: Iterable[tuple[Request, Row]], now: float) -> None:
        """Adds progress messages for prompts of which a step computed `chunks`. After a preemption the progress may be
        less than before; a request preempted during decoding reports none. now: monotonic seconds."""
        for request, row in chunks:
            if request.wants_progress and request.state is not State.FINISHED and not request.num_output:
                progress = request.progress(row.start + row.count, now)
                self.emit([TokensItem(request.id, [], progress=progress)])
