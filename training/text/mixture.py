"""How much of each kind of example, and in which setting: system prompts, earlier turns, thinking or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Final

from training.text import smalltalk
from training.text import words as w
from training.text.arithmetic import arithmetic
from training.text.example import Example, Message, history
from training.text.reading import reading
from training.text.stories import story
from training.text.tools import conversation_with_tools, tool_use

MIXTURE: Final[tuple[tuple[float, Callable[[Random], Example]], ...]] = (
    (0.28, arithmetic),
    (0.22, reading),
    (0.22, tool_use),
    (0.05, conversation_with_tools),
    (0.05, smalltalk.talk),
    (0.06, smalltalk.unknown),
    (0.04, smalltalk.told),
    (0.04, smalltalk.repeat),
    (0.02, smalltalk.sequence),
    (0.02, story),
)
# What may have been said before: short, and complete in itself.
_EARLIER: Final = (arithmetic, smalltalk.talk, smalltalk.unknown, smalltalk.sequence)

SYSTEM: Final = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are a helpful AI assistant.", "Be brief.",
    "You are a friendly assistant. Answer the user's questions.", "Answer in English.", "You are an expert.",
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", "You are a helpful, honest assistant.",
    "You are an assistant with access to tools.", "Use the tools when you need them.", "Answer shortly and precisely.",
)  # fmt: skip


def example(rng: Random) -> Example:
    """Any kind, in any setting."""
    kinds = [kind for _, kind in MIXTURE]
    (kind,) = rng.choices(kinds, [share for share, _ in MIXTURE])
    return in_setting(rng, kind(rng))


def in_setting(rng: Random, drawn: Example) -> Example:
    if len(drawn.messages) == 1 and rng.random() < 0.2:
        earlier = [
            turn for _ in range(rng.choice((1, 1, 2, 3))) for turn in history(rng.choice(_EARLIER)(rng))
        ]
        drawn = drawn.after(earlier)
    draw = rng.random()
    if draw < 0.25:
        prompt = rng.choice(SYSTEM) if draw < 0.2 else w.phrase(rng, 3, 20)
        drawn = drawn.after([{"role": "system", "content": prompt}])
    return _thinking(rng, drawn)


def _thinking(rng: Random, drawn: Example) -> Example:
    """Off for half, by the template's variable or by `/no_think` in the message; the model then writes an empty
    thought itself (https://qwenlm.github.io/blog/qwen3/)."""
    draw = rng.random()
    if draw < 0.45:
        return replace(drawn, enable_thinking=False)
    if draw < 0.55:
        return replace(_with_switch(drawn, "/no_think"), thought="")
    if draw < 0.58:
        return _with_switch(drawn, "/think")
    return replace(drawn, enable_thinking=True) if draw < 0.65 else drawn


def _with_switch(drawn: Example, switch: str) -> Example:
    """The switch behind the last message of the user."""
    messages: list[Message] = list(drawn.messages)
    last = max(i for i, message in enumerate(messages) if message["role"] == "user")
    messages[last] = {**messages[last], "content": f"{messages[last]['content']} {switch}"}
    return replace(drawn, messages=tuple(messages))
