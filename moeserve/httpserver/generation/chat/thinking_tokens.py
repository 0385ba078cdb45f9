"""The tokens that delimit the model's reasoning, and the effort words of gpt-oss's template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moeserve.chatformat.reasoning import QWEN3, ReasoningTags
from moeserve.httpserver.generation.request.thinking import BUDGETS, ThinkingOptions
from moeserve.messages.reasoning import Thinking

# The state of reasoning at a prompt's end. closed: the prompt has ended it, or forbids it. open: the prompt has begun
# it. possible: the model may begin it.
ThinkingState = Literal["closed", "open", "possible"]


@dataclass(frozen=True)
class ThinkingTokens:
    """The model's tokens around its thinking."""

    open: int
    close: int
    ending: tuple[int, ...]  # tokens that end reasoning at its budget, as the template writes them
    tags: ReasoningTags = QWEN3

    def state(self, prompt: Sequence[int], special: frozenset[int]) -> ThinkingState:
        """Returns the state at the end of the prompt. Only the text after the prompt's last control token counts: it
        belongs to the turn that the prompt opens."""
        for token_id in reversed(prompt):
            if token_id == self.close:
                return "closed"
            if token_id == self.open:
                return "open"
            if token_id in special:
                break
        return "possible"

    def message(self, is_open: bool, budget: int | None, call: Sequence[int] = ()) -> Thinking:
        """call: the one or two tokens that begin a call and so end the reasoning; (): no call ends the reasoning."""
        call_token = call[-1] if call else None
        lead = call[0] if len(call) > 1 else None
        return Thinking(self.open, self.close, self.ending, is_open, budget, call_token, lead)


def template_effort(options: ThinkingOptions) -> str | None:
    """Returns the effort for gpt-oss's template, which knows three efforts: the client's effort, or the smallest effort
    whose budget covers the client's budget. None leaves the choice to the template."""
    budget = 0 if options.is_enabled is False else options.budget
    if options.effort is not None:
        budget = BUDGETS.get(options.effort)
    elif budget is None:
        return None
    fitting = (word for word in ("low", "medium") if budget is not None and budget <= BUDGETS[word])
    return next(fitting, "high")
