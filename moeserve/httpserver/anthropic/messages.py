"""The messages of /v1/messages, and their translation to a chat template's messages.

Source: Anthropic's API reference (Messages, version 2023-06-01) and its Python client's types.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationInfo

from moeserve.httpserver.anthropic.content import (
    MAX_BLOCKS,
    Block,
    DocumentBlock,
    ImageBlock,
    ResultBlock,
    SearchResultBlock,
    TextBlock,
    Texts,
    text_of,
    text_to_block,
)
from moeserve.httpserver.generation.chat.chat_tools import CallArgumentsObject
from moeserve.httpserver.generation.request.foreign_history import types_of, without_unknown_types
from moeserve.httpserver.generation.request.pictures import joined
from moeserve.httpserver.transport.request_model import NO_EFFECT, Label, RequestModel, unsupported
from moeserve.httpserver.transport.unknown_fields import FOREIGN_BLOCK


class ThinkingBlock(RequestModel):
    """The thinking of an earlier turn, in the form in which this server's answer had it."""

    type: Literal["thinking"]
    thinking: str
    signature: Annotated[str, NO_EFFECT] = ""


class RedactedThinkingBlock(RequestModel):
    """Thinking that Anthropic's servers have encrypted, in a conversation that began there."""

    type: Literal["redacted_thinking"]
    data: Annotated[Any, NO_EFFECT]


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: Label
    name: Annotated[str, Field(max_length=1024)]
    input: CallArgumentsObject = Field(default_factory=dict)
    caller: Annotated[Any, unsupported("a caller", {"type": "direct"})] = None


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: Label
    content: Annotated[
        list[ResultBlock],
        BeforeValidator(text_to_block, json_schema_input_type=str | list[ResultBlock]),
        Field(max_length=MAX_BLOCKS, default_factory=list),
    ]
    is_error: Annotated[bool, Field(description='True puts "Error: " before the content.')] = False

    def text(self) -> str:
        return ("Error: " if self.is_error else "") + text_of(self.content)


UserBlock = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolResultBlock, Field(discriminator="type")
]
AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, Field(discriminator="type")
]


def _said(texts: list[str]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": joined(texts)}] if texts else []


class UserMessage(RequestModel):
    role: Literal["user"]
    content: Annotated[
        list[UserBlock],
        BeforeValidator(text_to_block, json_schema_input_type=str | list[UserBlock]),
        Field(min_length=1, max_length=MAX_BLOCKS),
    ]

    def for_template(self) -> list[dict[str, Any]]:
        """Returns a message for each tool result, and one for each run of consecutive texts, in order."""
        messages: list[dict[str, Any]] = []
        texts: list[str] = []
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                messages += _said(texts)
                texts = []
                messages.append({"role": "tool", "content": block.text(), "tool_call_id": block.tool_use_id})
            else:
                texts.append(block.text)
        return messages + _said(texts)


class SystemMessage(RequestModel):
    """A system message within a conversation, as agents send it."""

    role: Literal["system"]
    content: Texts

    def for_template(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": text_of(self.content)}]


_KNOWN_TYPES: Final = types_of(TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock)


def _to_known_blocks(content: Any, info: ValidationInfo) -> Any:
    """Leaves out blocks of tools that ran at Anthropic. A compaction is the text of the messages that it replaced."""
    if isinstance(content, list):
        content = [_compacted(block) if isinstance(block, dict) else block for block in content]
    return without_unknown_types(text_to_block(content), _KNOWN_TYPES, FOREIGN_BLOCK, info)


def _compacted(block: dict[str, Any]) -> dict[str, Any]:
    is_text = block.get("type") == "compaction" and isinstance(block.get("content"), str)
    return {"type": "text", "text": block["content"]} if is_text else block


class AssistantMessage(RequestModel):
    role: Literal["assistant"]
    content: Annotated[
        list[AssistantBlock],
        BeforeValidator(_to_known_blocks, json_schema_input_type=str | list[AssistantBlock]),
        Field(max_length=MAX_BLOCKS),
    ]

    def for_template(self) -> list[dict[str, Any]]:
        text, reasoning = "", ""
        calls: list[dict[str, Any]] = []
        for block in self.content:
            match block:
                case TextBlock():
                    text += block.text
                case ThinkingBlock():
                    reasoning += block.thinking
                case ToolUseBlock():
                    function = {"name": block.name, "arguments": block.input}
                    calls.append({"id": block.id, "type": "function", "function": function})
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return [message]


AnyMessage = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]
