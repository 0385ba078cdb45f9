"""One choice's answer as /v1/chat/completions shows it: the complete message, or its deltas."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Final

from moeserve.chatformat.events import (
    CallArguments,
    CallBroken,
    CallEnd,
    CallStart,
    Event,
    Reasoning,
    Text,
)
from moeserve.httpserver.generation.chat.answers import Answer, Call, new_call_id
from moeserve.httpserver.generation.request.custom_tools import input_of
from moeserve.httpserver.openai.objects import (
    ChatDelta,
    ChatMessage,
    CustomDelta,
    FunctionDelta,
    ToolCall,
)


class ChatAnswer:
    """Makes messages or deltas. custom: names of the tools that take free text. is_legacy: the request has `functions`,
    OpenAI's older form, so the answer's one call is its `function_call`."""

    def __init__(self, custom: Set[str], is_legacy: bool) -> None:
        self._custom: Final = custom
        self._is_legacy: Final = is_legacy
        # The arguments' JSON so far of each incomplete call of a custom tool, by call.
        self._inputs: dict[int, str] = {}

    def message(self, found: Answer) -> ChatMessage:
        message: ChatMessage = {"role": "assistant", "content": found.text, "refusal": None}
        if found.reasoning:
            message["reasoning"] = message["reasoning_content"] = found.reasoning
        if not found.calls:
            return message
        message["content"] = found.text or None
        if self._is_legacy:
            message["function_call"] = {"name": found.calls[0].name, "arguments": found.calls[0].arguments}
        else:
            message["tool_calls"] = [self._call(call) for call in found.calls]
        return message

    def delta(self, event: Event) -> ChatDelta | None:
        """Returns the event as a delta; None if there is nothing to send."""
        match event:
            case Text(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning": text, "reasoning_content": text}
            case CallStart(index, name) if name in self._custom:
                self._inputs[index] = ""
                started: CustomDelta = {"name": name, "input": ""}
                return _call_delta(index, id=new_call_id(), type="custom", custom=started)
            case CallArguments(index, text) if index in self._inputs:
                self._inputs[index] += text
                return None
            case CallEnd(index) if index in self._inputs:
                return _call_delta(index, custom={"input": input_of(self._inputs.pop(index))})
            case CallBroken(index, _, rest) if index in self._inputs:
                return {"content": rest, **_call_delta(index, custom={"input": self._inputs.pop(index)})}
            case CallStart(index, name):
                return self._function_delta(index, {"name": name, "arguments": ""}, is_start=True)
            case CallArguments(index, text):
                return self._function_delta(index, {"arguments": text}, is_start=False)
            case CallBroken(_, _, rest):
                return {"content": rest}
        return None

    def _function_delta(self, index: int, delta: FunctionDelta, *, is_start: bool) -> ChatDelta:
        if self._is_legacy:
            return {"function_call": delta}
        if is_start:
            return _call_delta(index, id=new_call_id(), type="function", function=delta)
        return _call_delta(index, function=delta)

    def _call(self, call: Call) -> ToolCall:
        if call.name in self._custom:
            given = input_of(call.arguments)
            return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": given}}
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": call.id, "type": "function", "function": function}  # type: ignore[typeddict-item]


def _call_delta(index: int, **fields: Any) -> ChatDelta:
    return {"tool_calls": [{"index": index, **fields}]}  # type: ignore[typeddict-item]
