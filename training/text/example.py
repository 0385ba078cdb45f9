"""One thing to learn: a conversation, what to think about it, and what to answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

Message = dict[str, Any]  # as chat templates take them
Tool = dict[str, Any]  # as OpenAI's API declares them


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, Any]

    def text(self) -> str:
        """As Qwen3 writes it (Hermes format)."""
        body = json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"

    def for_message(self) -> Message:
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class Example:
    """`calls` or `answer`, never both. The thought is written when thinking is on; every example has one."""

    messages: tuple[Message, ...]  # up to the one that is answered
    thought: str
    answer: str = ""
    calls: tuple[Call, ...] = ()
    tools: tuple[Tool, ...] = ()
    enable_thinking: bool | None = field(default=None)  # what the chat template is told; None: nothing

    @property
    def completion(self) -> str:
        """What the model writes after its thought."""
        return "\n".join(call.text() for call in self.calls) if self.calls else self.answer

    def after(self, earlier: Sequence[Message]) -> Example:
        """The same, further on in a conversation."""
        return replace(self, messages=(*earlier, *self.messages))


def ask(question: str, thought: str, answer: str) -> Example:
    return Example((user(question),), thought, answer)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, calls: Sequence[Call] = ()) -> Message:
    message: Message = {"role": "assistant", "content": text}
    return {**message, "tool_calls": [call.for_message() for call in calls]} if calls else message


def history(example: Example) -> list[Message]:
    """The example as the earlier turns of a conversation: without its thought, as the template drops it."""
    return [*example.messages, assistant(example.answer, example.calls)]


def casual(rng: Random, question: str) -> str:
    """As people type: polite, in a hurry, without a capital or a full stop."""
    draw = rng.random()
    if draw < 0.08:
        question = rng.choice(("Please ", "please ", "Hey, ", "Hi! ", "ok, ", "So ", "Now ")) + _lower_first(
            question
        )
    elif draw < 0.14 and question[-1] in "?.":
        question = f"{question[:-1]}, please{question[-1]}"
    draw = rng.random()
    if draw < 0.1:
        question = _lower_first(question)
    if rng.random() < 0.12:
        question = question.rstrip("?.")
    return question


def _lower_first(text: str) -> str:
    return text if text.startswith("I ") else text[:1].lower() + text[1:]
