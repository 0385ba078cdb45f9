"""Conversations in the form that the templates of some formats are written for.

Everything else has OpenAI's form, with a call's arguments as an object and thoughts as `reasoning_content`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

from moeserve.chatformat.guided import GuidedCalls

Conversation = list[dict[str, Any]]

# Where a DeepSeek template itself makes JSON of a call's arguments; without, it joins them to other text.
_SHOWS_TOOLS: Final = re.compile(r"\btools\b")
_TO_JSON: Final = re.compile(r"arguments\W{0,3}\s*\|\s*tojson")


def for_harmony(messages: Sequence[dict[str, Any]]) -> Conversation:
    """gpt-oss's template takes thoughts as `thinking`, one call a message, whose result follows it, and beside a call
    either a thought or a text, which it shows as the thought."""
    adapted: Conversation = []
    turn: list[Conversation] = []  # of the calls made at once: each with its results
    for message in messages:
        if message["role"] == "tool" and turn:
            _answered(message, turn).append(message)
            continue
        adapted += chain.from_iterable(turn)
        turn = [[call] for call in _one_call_each(message)]
        if not turn:
            adapted.append(_with_thinking(message))
    return adapted + list(chain.from_iterable(turn))


def _answered(result: Mapping[str, Any], turn: Sequence[Conversation]) -> Conversation:
    """Returns the call that the result is of: by its id; or else of those without a result the next one of its tool, or
    the next."""
    call_id, tool = result.get("tool_call_id"), result.get("name")
    calls = [one[0]["tool_calls"][0] for one in turn]
    if call_id is not None:
        for one, call in zip(turn, calls, strict=True):
            if call.get("id") == call_id:
                return one
    waiting = [(one, call) for one, call in zip(turn, calls, strict=True) if len(one) == 1]
    of_tool = (one for one, call in waiting if call["function"]["name"] == tool)
    return next(of_tool, None) or next((one for one, _ in waiting), turn[-1])


def _one_call_each(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a message for each call; the first has the thought and the text."""
    texts = [text for text in (message.get("reasoning_content"), message["content"]) if text]
    for number, call in enumerate(message.get("tool_calls", [])):
        thought = {"thinking": "\n\n".join(texts)} if texts and number == 0 else {}
        yield {"role": "assistant", "content": "", "tool_calls": [call], **thought}


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    thought = message.get("reasoning_content")
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    return rest | {"thinking": thought} if thought else rest


def described(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """gpt-oss's template needs a description of every tool."""
    return [{**tool, "function": {"description": ""} | tool["function"]} for tool in tools]


def for_deepseek(messages: Sequence[dict[str, Any]], template: str) -> Conversation:
    """DeepSeek's templates take a call's arguments as text, and no content where there are only calls."""
    if _TO_JSON.search(template):
        return list(messages)
    return [_with_text_arguments(message) if "tool_calls" in message else message for message in messages]


def shows_tools(template: str) -> bool:
    return _SHOWS_TOOLS.search(template) is not None


def with_tools(
    messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]], guided: GuidedCalls
) -> Conversation:
    """Describes the tools in the system message: for templates that do not show them. The form is that of
    DeepSeek-V3.1's model card."""
    lines = ["## Tools", "You have access to the following tools:"]
    for tool in tools:
        function = tool["function"]
        parameters = json.dumps(function["parameters"], ensure_ascii=False)
        lines += ["", f"### {function['name']}", f"Description: {function.get('description', '')}"]
        lines += ["", f"Parameters: {parameters}"]
    call = f"{guided.before_name}NAME{guided.before_arguments}ARGUMENTS{guided.behind}"
    lines += ["", "Tool calls must have exactly this form:", f"{guided.open}{call}{guided.close}", ""]
    lines += ["NAME is the tool's name, and ARGUMENTS is JSON that follows its parameters."]
    if guided.is_block:
        lines.append(f"Further calls come before {guided.close}")
    text = "\n".join(lines)
    if messages and messages[0]["role"] == "system":
        first, *rest = messages
        return [first | {"content": f"{first['content']}\n\n{text}"}, *rest]
    return [{"role": "system", "content": text}, *messages]


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": text}})
    return message | {"content": message["content"] or None, "tool_calls": calls}
