"""Conversations in the form that some formats' templates expect.

All other templates get OpenAI's form, with a call's arguments as an object and reasoning as `reasoning_content`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from moeserve.chatformat.guided import GuidedCalls
from moeserve.httpserver.generation.chat.template_shape import Conversation, one_call_each

_SHOWS_TOOLS: Final = re.compile(r"\btools\b")
# Matches Phi-4-mini's template, which shows the tools that the system message has as text, and no calls.
_TOOLS_OF_MESSAGE: Final = re.compile(r"message(\.|\[['\"])tools\b")
_ASSISTANT_WITH_TOOLS: Final = "You are a helpful assistant with some tools."
# Matches DeepSeek templates that convert a call's arguments to JSON; DeepSeek's other templates concatenate the
# arguments as text.
_TO_JSON: Final = re.compile(r"arguments\W{0,3}\s*\|\s*tojson")


def for_harmony(messages: Sequence[dict[str, Any]]) -> Conversation:
    """Returns messages in the form of gpt-oss's template: reasoning as `thinking`, and one call a message, directly
    before its result. Beside a call the template takes either reasoning or a text, which it shows as reasoning."""
    return [_with_thinking(message) for message in one_call_each(messages)]


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    parts = [message.get("reasoning_content")]
    if "tool_calls" in message:
        parts.append(message["content"])
        message = message | {"content": ""}
    text = "\n\n".join(part for part in parts if part)
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    return rest | {"thinking": text} if text else rest


def for_solar(messages: Sequence[dict[str, Any]]) -> Conversation:
    """Returns messages in the form of Solar Open's template: reasoning as `reasoning`, and text and calls in messages
    of their own, as the model writes them. The template leaves out a text beside calls."""
    adapted: Conversation = []
    for message in messages:
        if message.get("reasoning_content"):
            message = message | {"reasoning": message["reasoning_content"]}
        if message.get("tool_calls") and message["content"]:
            adapted.append({name: value for name, value in message.items() if name != "tool_calls"})
            message = {"role": message["role"], "content": "", "tool_calls": message["tool_calls"]}
        adapted.append(message)
    return adapted


def with_ids(messages: Sequence[dict[str, Any]], call_id: Callable[[str, int], str]) -> Conversation:
    """Returns the messages with ids of calls in the model's own format, made from the tool's name and the call's number
    in the conversation; results get the ids of their calls. A result without an id belongs to the next call."""
    adapted = []
    ids: dict[Any, str] = {}  # the model's ids of the latest calls, by the client's ids
    waiting: list[str] = []
    count = 0
    for message in messages:
        if message.get("tool_calls"):
            calls = []
            ids, waiting = {}, []
            for call in message["tool_calls"]:
                waiting.append(call_id(call["function"]["name"], count))
                ids[call.get("id")] = waiting[-1]
                calls.append({**call, "id": waiting[-1]})
                count += 1
            message = message | {"tool_calls": calls}
        elif message["role"] == "tool" and waiting:
            found = ids.get(message.get("tool_call_id"), waiting[0])
            waiting = [one for one in waiting if one != found]
            message = message | {"tool_call_id": found}
        adapted.append(message)
    return adapted


def described(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the tools, each with a description, which some templates require."""
    return [{**tool, "function": {"description": ""} | tool["function"]} for tool in tools]


def for_deepseek(messages: Sequence[dict[str, Any]], template: str) -> Conversation:
    """Returns messages in the form that DeepSeek's templates expect: a call's arguments as text unless the template
    converts them, and no content in a message that has only calls."""
    if _TO_JSON.search(template):
        return list(messages)
    return [_with_text_arguments(message) if "tool_calls" in message else message for message in messages]


def shows_tools(template: str) -> bool:
    return _SHOWS_TOOLS.search(template) is not None


def with_tools(
    messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]], guided: GuidedCalls
) -> Conversation:
    """Returns the messages with the tools described in the system message, for templates that do not show them. Source
    of the form: DeepSeek-V3.1's model card."""
    lines = ["## Tools", "You have access to the following tools:"]
    for tool in tools:
        function = tool["function"]
        parameters = json.dumps(function["parameters"], ensure_ascii=False)
        lines += ["", f"### {function['name']}", f"Description: {function.get('description', '')}"]
        lines += ["", f"Parameters: {parameters}"]
    number = ":NUMBER" if guided.numbered else ""
    call = f"{guided.before_name}NAME{number}{guided.before_arguments}ARGUMENTS{guided.behind}"
    lines += ["", "Tool calls must have exactly this form:", f"{guided.open}{call}{guided.close}", ""]
    lines += ["NAME is the tool's name, and ARGUMENTS is JSON that follows its parameters."]
    if guided.is_block:
        lines.append(f"Further calls come before {guided.close}")
    text = "\n".join(lines)
    if messages and messages[0]["role"] == "system":
        first, *rest = messages
        return [first | {"content": f"{first['content']}\n\n{text}"}, *rest]
    return [{"role": "system", "content": text}, *messages]


def reads_tools_of_message(template: str) -> bool:
    return _TOOLS_OF_MESSAGE.search(template) is not None


def with_tools_in_message(
    messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None, guided: GuidedCalls
) -> Conversation:
    """Returns messages in the form of a template that shows roles and texts only: the tools as JSON in the system
    message's `tools`, calls written in the model's own form, results in the role for which it has a token. Source of
    the form: Phi-4-mini's model card."""
    adapted = [_with_calls_written(message, guided) for message in messages]
    if not tools:
        return adapted
    listed = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    if not adapted or adapted[0]["role"] != "system":
        adapted.insert(0, {"role": "system", "content": _ASSISTANT_WITH_TOOLS})
    return [adapted[0] | {"tools": listed}, *adapted[1:]]


def _with_calls_written(message: dict[str, Any], guided: GuidedCalls) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "tool_response", "content": message["content"]}
    if not message.get("tool_calls"):
        return message
    written = [message["content"] or ""]
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        inner = f"{guided.before_name}{function['name']}{guided.before_arguments}{text}{guided.behind}"
        written.append(f"{guided.open}{inner}{guided.close}")
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return rest | {"content": "".join(written)}


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": text}})
    return message | {"content": message["content"] or None, "tool_calls": calls}
