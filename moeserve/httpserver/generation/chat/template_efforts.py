"""The words of reasoning effort that a chat template knows, found by rendering it, and the client's effort in them."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from moeserve.httpserver.generation.request.thinking import BUDGETS, ThinkingOptions
from moeserve.tokenizer.errors import TemplateError, TemplateTimeout

VARIABLE: Final = "reasoning_effort"
_VARIABLES: Final = (VARIABLE, "thinking_effort")  # the second is Kimi-K3's
# Template variables that switch reasoning; the second is DeepSeek's.
SWITCHES: Final = ("enable_thinking", "thinking")
_OFF: Final = ("none", "no_think")  # words for no reasoning; the second is Hunyuan 3's
_LEVELS: Final = ("minimal", "low", "medium", "high", "xhigh", "max")  # least first

# Renders a short conversation with variables. Raises TemplateError.
Render = Callable[[Mapping[str, Any]], str]


@dataclass(frozen=True, slots=True)
class TemplateEfforts:
    """The words that the template accepts as `variable`. With neither `off` nor `levels`, the template does not read
    it."""

    off: str | None = None  # the word for no reasoning; None: there is none
    levels: tuple[str, ...] = ()  # the others, least first
    variable: str = VARIABLE

    def word(self, options: ThinkingOptions) -> str | None:
        """Returns the template's word for the effort that the client asks for: the same effort if the template has it,
        else the next higher one, else the highest. A budget in tokens stands for the smallest effort that covers it.
        None leaves the choice to the template."""
        if options.is_enabled is False:
            return self.off or self._level(_LEVELS[0])
        if options.effort is not None:
            return self._level(options.effort)
        budget = options.budget
        covering = (word for word in _LEVELS if budget is not None and budget <= BUDGETS.get(word, -1))
        asked = next(covering, None)
        return None if asked is None else self._level(asked)

    def _level(self, asked: str) -> str | None:
        least = _LEVELS.index(asked)
        fitting = (word for word in self.levels if _LEVELS.index(word) >= least)
        return next(fitting, self.levels[-1] if self.levels else None)


def efforts_of(source: str, render: Render) -> TemplateEfforts:
    """Returns the words that the template knows. source: the template's text.

    Templates treat an unknown word as one of theirs. So a word counts as known if the template accepts it, and either
    renders it differently from a made-up word or contains it in quotes.
    """
    variable = next((name for name in _VARIABLES if name in source), None)
    if variable is None:
        return TemplateEfforts()
    try:
        unknown = _rendered(render, variable, f"effort{secrets.token_hex(8)}")
        shown = {word: _rendered(render, variable, word) for word in (*_OFF, *_LEVELS)}
    except TemplateTimeout:
        return TemplateEfforts()
    if len({unknown, *shown.values()}) == 1:  # refused or ignored, whatever it is
        return TemplateEfforts()
    known = [
        word
        for word, text in shown.items()
        if text is not None and (text != unknown or re.search(f"""(['"]){word}\\1""", source))
    ]
    return TemplateEfforts(
        next((word for word in _OFF if word in known), None),
        tuple(word for word in known if word in _LEVELS),
        variable,
    )


def _rendered(render: Render, variable: str, word: str) -> str | None:
    """Returns None if the template refuses the word. Reasoning is on, without which some templates ignore the word.
    Raises TemplateTimeout."""
    try:
        return render(dict.fromkeys(SWITCHES, True) | {variable: word})
    except TemplateTimeout:
        raise
    except TemplateError:
        return None
