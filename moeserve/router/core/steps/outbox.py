"""The messages to the detokenizer that wait to be sent, in the order in which things happened."""

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
        """Appends to the last TokensOut if it is the last message, so that a step sends one message."""
        if not items:
            return
        last = self._messages[-1] if self._messages else None
        if isinstance(last, TokensOut):
            last.items.extend(items)
        else:
            self._messages.append(TokensOut(items=items))

    def take(self) -> list[RouterMessage]:
        """All since the last call, in order."""
        messages, self._messages = self._messages, []
        return messages

    def emit_prompt_logprobs(self, owner: Request, start: int, logprobs: list[TokenLogprob]) -> None:
        """Those of the prompt's positions from `start` on, but for what has been sent before a preemption already."""
        if owner.state is State.FINISHED:
            return
        new = logprobs[owner.num_scored - start :]
        owner.num_scored += len(new)
        if new:
            self.emit([TokensItem(owner.id, [], prompt_logprobs=new)])

    def emit_progress(self, chunks: Iterable[tuple[Request, Row]], now: float) -> None:
        """How far prompts are, of which a step has prefilled `chunks`. After a preemption it may be less than before; a
        request that is preempted while it decodes reports none."""
        for request, row in chunks:
            if request.wants_progress and request.state is not State.FINISHED and not request.num_output:
                progress = request.progress(row.start + row.count, now)
                self.emit([TokensItem(request.id, [], progress=progress)])
