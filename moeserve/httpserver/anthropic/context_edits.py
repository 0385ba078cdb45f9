"""Context edits: parts of a long conversation that a request asks to leave out of the prompt.

Source: Anthropic's documentation of context editing (clear_tool_uses_20250919, clear_thinking_20251015).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from moeserve.httpserver.anthropic.content import TextBlock
from moeserve.httpserver.anthropic.messages import (
    AnyMessage,
    AssistantMessage,
    RedactedThinkingBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
)
from moeserve.httpserver.anthropic.objects import AppliedEdit
from moeserve.httpserver.generation.chat.chat_tools import MAX_TOOLS
from moeserve.httpserver.generation.request.fields import INT32_MAX
from moeserve.httpserver.transport.request_model import RequestModel

CLEARED: Final = "(This result was cleared to save context.)"
MAX_EDITS: Final = 16
Amount = Annotated[int, Field(ge=0, le=INT32_MAX)]
Conversation = Sequence[AnyMessage]


class InputTokenAmount(RequestModel):
    type: Literal["input_tokens"]
    value: Amount


class ToolUseAmount(RequestModel):
    type: Literal["tool_uses"]
    value: Amount


class ClearToolUses(RequestModel):
    """Replaces the results of all tool uses except the last ones, if the prompt is long."""

    empty: ClassVar = frozenset({"exclude_tools", "clear_tool_inputs"})

    type: Literal["clear_tool_uses_20250919"]
    trigger: Annotated[InputTokenAmount | ToolUseAmount, Field(discriminator="type")] = InputTokenAmount(
        type="input_tokens", value=100_000
    )
    keep: ToolUseAmount = ToolUseAmount(type="tool_uses", value=3)
    clear_at_least: Annotated[
        InputTokenAmount | None, Field(description="An edit that would clear fewer tokens is left undone.")
    ] = None
    exclude_tools: Annotated[
        list[Annotated[str, Field(max_length=1024)]], Field(max_length=MAX_TOOLS, default_factory=list)
    ]
    clear_tool_inputs: Annotated[
        bool | Annotated[list[Annotated[str, Field(max_length=1024)]], Field(max_length=MAX_TOOLS)],
        Field(
            description="True: the calls' inputs are cleared too. A list of tools: only inputs of their calls."
        ),
    ] = False

    def without(self, messages: Conversation) -> tuple[list[AnyMessage], int]:
        """Returns the messages with all clearable results cleared, and the number of tool uses cleared."""
        names = {block.id: block.name for block in _tool_uses(messages)}
        results = [
            block.tool_use_id
            for message in messages
            if isinstance(message, UserMessage)
            for block in message.content
            if isinstance(block, ToolResultBlock)
        ]
        oldest = results[: max(len(results) - self.keep.value, 0)]
        gone = {one for one in oldest if names.get(one) not in self.exclude_tools}
        return [self._edited(message, gone) for message in messages], len(gone)

    def _edited(self, message: AnyMessage, gone: set[str]) -> AnyMessage:
        match message:
            case UserMessage():
                placeholder = [TextBlock(type="text", text=CLEARED)]
                content = [
                    block.model_copy(update={"content": placeholder, "is_error": False})
                    if isinstance(block, ToolResultBlock) and block.tool_use_id in gone
                    else block
                    for block in message.content
                ]
                return message.model_copy(update={"content": content})
            case AssistantMessage() if self.clear_tool_inputs:
                inputs = [
                    block.model_copy(update={"input": {}})
                    if isinstance(block, ToolUseBlock) and block.id in gone and self._clears_input(block.name)
                    else block
                    for block in message.content
                ]
                return message.model_copy(update={"content": inputs})
        return message

    def _clears_input(self, name: str) -> bool:
        chosen = self.clear_tool_inputs
        return chosen if isinstance(chosen, bool) else name in chosen

    def is_due(self, messages: Conversation, tokens: int) -> bool:
        """Returns whether a conversation of `tokens` tokens is long enough for the edit."""
        is_of_tokens = isinstance(self.trigger, InputTokenAmount)
        return (tokens if is_of_tokens else len(_tool_uses(messages))) > self.trigger.value

    @property
    def least(self) -> int:
        """The fewest tokens that an edit must clear; an edit that would clear fewer is not made."""
        return 0 if self.clear_at_least is None else self.clear_at_least.value

    def report(self, cleared: int, tokens: int) -> AppliedEdit:
        return {"type": self.type, "cleared_tool_uses": cleared, "cleared_input_tokens": tokens}


class ThinkingTurns(RequestModel):
    type: Literal["thinking_turns"]
    value: Annotated[int, Field(ge=1, le=INT32_MAX)]


class AllTurns(RequestModel):
    type: Literal["all"]


class ClearThinking(RequestModel):
    """Leaves out the thinking of all turns except the last ones. A turn begins with a user's message that has content
    besides tool results."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | Annotated[ThinkingTurns | AllTurns, Field(discriminator="type")] = ThinkingTurns(
        type="thinking_turns", value=1
    )

    def without(self, messages: Conversation) -> tuple[list[AnyMessage], int]:
        """Returns the messages without the cleared thinking, and the number of turns whose thinking was cleared."""
        if not isinstance(self.keep, ThinkingTurns):
            return list(messages), 0
        turns = _turns(messages)
        reasoning = sorted({turn for turn, one in zip(turns, messages, strict=True) if _thinks(one)})
        gone = set(reasoning[: max(len(reasoning) - self.keep.value, 0)])
        left = [
            _without_thinking(message) if turn in gone else message
            for turn, message in zip(turns, messages, strict=True)
        ]
        return left, len(gone)

    def is_due(self, messages: Conversation, tokens: int) -> bool:
        return True

    least: ClassVar = 0

    def report(self, cleared: int, tokens: int) -> AppliedEdit:
        return {"type": self.type, "cleared_thinking_turns": cleared, "cleared_input_tokens": tokens}


Edit = Annotated[ClearToolUses | ClearThinking, Field(discriminator="type")]


class ContextManagement(RequestModel):
    edits: Annotated[list[Edit], Field(max_length=MAX_EDITS, default_factory=list)]


async def edited(
    messages: Conversation, edits: Sequence[Edit], count: Callable[[Conversation], Awaitable[int]]
) -> tuple[list[AnyMessage], list[AppliedEdit]]:
    """Applies the edits that are due, except edits that would lengthen the conversation. Returns the messages and the
    effect of each edit. `count` returns the number of prompt tokens of messages; it is called only if an edit would
    change something."""
    now, applied = list(messages), list[AppliedEdit]()
    tokens: int | None = None
    for edit in edits:
        shorter, cleared = edit.without(now)
        if not cleared:
            continue
        if tokens is None:
            tokens = await count(now)
        if not edit.is_due(now, tokens):
            continue
        left = await count(shorter)
        if tokens - left < edit.least:
            continue
        applied.append(edit.report(cleared, tokens - left))
        now, tokens = shorter, left
    return now, applied


def _tool_uses(messages: Conversation) -> list[ToolUseBlock]:
    return [
        block
        for message in messages
        if isinstance(message, AssistantMessage)
        for block in message.content
        if isinstance(block, ToolUseBlock)
    ]


def _turns(messages: Conversation) -> list[int]:
    """Returns each message's turn, counted from the conversation's start."""
    turns, turn = [], 0
    for message in messages:
        if isinstance(message, UserMessage):
            turn += any(not isinstance(block, ToolResultBlock) for block in message.content)
        turns.append(turn)
    return turns


def _thinks(message: AnyMessage) -> bool:
    return isinstance(message, AssistantMessage) and any(
        isinstance(block, ThinkingBlock | RedactedThinkingBlock) for block in message.content
    )


def _without_thinking(message: AnyMessage) -> AnyMessage:
    if not isinstance(message, AssistantMessage):
        return message
    kept = [b for b in message.content if not isinstance(b, ThinkingBlock | RedactedThinkingBlock)]
    return message.model_copy(update={"content": kept})
