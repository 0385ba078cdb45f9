"""Finds where the answer begins after the model's reasoning. Stop strings end the answer, and a model also writes them
while it plans the answer."""

from __future__ import annotations

from typing import Literal

from moeserve.messages.sampling import Thinking

# possible: the model may begin to reason. open: it reasons. blank: it has ended its reasoning, and has written blanks.
_State = Literal["possible", "open", "blank", "answer"]


class AnswerStart:
    """Follows a request's tokens up to the answer."""

    def __init__(self, reasoning: Thinking | None) -> None:
        """reasoning: None if the answer has none."""
        self._reasoning = reasoning
        self._state: _State = "answer"
        if reasoning is not None:
            self._state = "open" if reasoning.is_open else "possible"
        self._before = -1  # the token before

    def ends_reasoning(self, token_id: int) -> bool:
        """Returns whether this token, which is pushed next, ends the reasoning."""
        reasoning = self._reasoning
        if reasoning is None or self._state != "open":
            return False
        is_call = token_id == reasoning.call_token and reasoning.call_lead in (None, self._before)
        return is_call or token_id == reasoning.close_token

    def push(self, token_id: int, text: str) -> bool:
        """Takes the next token, with the text that it completes. Returns whether a stop string may end with it: in the
        answer, and with the token that closes the reasoning, so that a stop string may be its closing tag."""
        if self._reasoning is None or self._state == "answer":
            return True
        ends = self.ends_reasoning(token_id)
        self._before = token_id
        if self._state == "open":
            if ends:
                self._state = "blank" if token_id == self._reasoning.close_token else "answer"
            return ends
        if self._state == "possible" and token_id == self._reasoning.open_token:
            self._state = "open"
            return False
        if text.strip():
            self._state = "answer"
        return self._state != "blank"
