"""Rewrites conversations that a chat template would refuse or show incompletely.

Many templates show a system message in the first place only, drop an assistant's text beside a call, or raise an error
for two consecutive messages of one role. `template_probe.py` finds out which of these a template does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from moeserve.httpserver.generation.chat.broken_arguments import as_object

Message = Mapping[str, Any]
Conversation = list[dict[str, Any]]

_SEPARATOR: Final = "\n\n"  # between the texts of two messages that become one


@dataclass(frozen=True, slots=True)
class TemplateShape:
    """The changes to a conversation's messages before they are rendered. By default there are none."""

    systems: Literal["shown", "dropped"] = "shown"  # "dropped": system texts become users'
    joins_systems: bool = False  # system messages at the beginning become one
    moves_late_systems: bool = False  # a later system message becomes a user's, in the same place
    # If there is no user message, the last system message becomes one, or an empty user message is put first.
    asks_for_user: bool = False
    begins_with_user: bool = False  # an empty user message is put before a first message of the assistant
    joins_users: bool = False
    joins_assistants: bool = False
    splits_calls: bool = False  # each call is in a message of its own, followed by its results
    # An assistant's text beside calls becomes a message of its own: always, or only if a later answer has no calls.
    texts_before_calls: Literal["", "answered", "all"] = ""
    writes_calls: bool = False  # calls become text, and their results user messages
    moves_lone_results: bool = False  # a tool's result without a call becomes a user message
    needs_objects: bool = False  # arguments that are no JSON object become one
    gives_ids: bool = False  # calls without an id, and their results, get one

    def fitted(self, messages: Sequence[Message]) -> Conversation:
        """Returns the conversation in a form that the template shows completely. No message is changed in place."""
        found = [dict(message) for message in messages]
        for applies, step in self._steps():
            if applies:
                found = step(found)
        return found

    def _steps(self) -> Iterator[tuple[bool, Callable[[Conversation], Conversation]]]:
        """Yields the changes in order, each with a bool that says whether it applies. A later change applies to the
        result of the earlier ones."""
        yield self.needs_objects, _arguments_as_objects
        yield self.gives_ids, _with_all_ids
        yield self.writes_calls, _calls_written
        yield self.moves_lone_results, _lone_results_moved
        yield self.systems == "dropped", _systems_as_users
        yield self.joins_systems, _first_systems_joined
        yield self.moves_late_systems, _late_systems_moved
        yield self.asks_for_user, _with_a_user
        yield bool(self.texts_before_calls), self._texts_split
        yield self.splits_calls, one_call_each
        yield self.joins_users, _users_joined
        yield self.joins_assistants, _assistants_joined
        yield self.begins_with_user, _user_first

    def _texts_split(self, messages: Conversation) -> Conversation:
        plain = [at for at, one in enumerate(messages) if _is_answer(one)]
        last = len(messages) if self.texts_before_calls == "all" else max(plain, default=0)
        split: Conversation = []
        for at, message in enumerate(messages):
            if at < last and message["content"] and message.get("tool_calls"):
                split.append({"role": "assistant", "content": message["content"]})
                message = message | {"content": ""}
            split.append(message)
        return split


@dataclass(frozen=True, slots=True)
class Shapes:
    """A template's shapes: without tools and with them."""

    plain: TemplateShape = TemplateShape()
    with_tools: TemplateShape = TemplateShape()


def one_call_each(messages: Sequence[Message]) -> Conversation:
    """Returns the messages with those of several calls split: each call becomes a message of its own, and its results
    follow it."""
    split: Conversation = []
    turn: list[Conversation] = []  # calls made at once, each with its results
    for message in messages:
        if message["role"] == "tool" and turn:
            _answered(message, turn).append(dict(message))
            continue
        split += [one for call in turn for one in call]
        turn = [[one] for one in _calls_of(message)]
        if not turn:
            split.append(dict(message))
    return split + [one for call in turn for one in call]


def _calls_of(message: Message) -> Iterator[dict[str, Any]]:
    """Yields one message for each call; the first has the reasoning and the text, too."""
    for number, call in enumerate(message.get("tool_calls", [])):
        rest = message if number == 0 else {"role": message["role"], "content": ""}
        yield {**rest, "tool_calls": [call]}


def _answered(result: Message, turn: Sequence[Conversation]) -> Conversation:
    """Returns the call that the result belongs to: by its id; else the next call of its tool that has no result; else
    the next call."""
    call_id, tool = result.get("tool_call_id"), result.get("name")
    calls = [one[0]["tool_calls"][0] for one in turn]
    if call_id is not None:
        for one, call in zip(turn, calls, strict=True):
            if call.get("id") == call_id:
                return one
    waiting = [(one, call) for one, call in zip(turn, calls, strict=True) if len(one) == 1]
    of_tool = (one for one, call in waiting if call["function"]["name"] == tool)
    return next(of_tool, None) or next((one for one, _ in waiting), turn[-1])


def _is_answer(message: Message) -> bool:
    return message["role"] == "assistant" and not message.get("tool_calls")


def _as_user(message: Message) -> dict[str, Any]:
    return {"role": "user", "content": message["content"]}


def _joined(texts: Sequence[str | None]) -> str:
    return _SEPARATOR.join(text for text in texts if text)


def _systems_as_users(messages: Conversation) -> Conversation:
    return [_as_user(one) if one["role"] == "system" else one for one in messages]


def _first_systems_joined(messages: Conversation) -> Conversation:
    count = _num_first_systems(messages)
    if count < 2:
        return messages
    text = _joined([one["content"] for one in messages[:count]])
    return [messages[0] | {"content": text}, *messages[count:]]


def _num_first_systems(messages: Sequence[Message]) -> int:
    return next((at for at, one in enumerate(messages) if one["role"] != "system"), len(messages))


def _late_systems_moved(messages: Conversation) -> Conversation:
    """Turns system messages after the beginning into user messages. A message between a call and its results moves
    behind the last result."""
    count = _num_first_systems(messages)
    moved = messages[:count]
    waiting: Conversation = []
    for message in messages[count:]:
        if message["role"] == "system":
            waiting.append(_as_user(message))
            continue
        if message["role"] != "tool":
            moved += waiting
            waiting = []
        moved.append(message)
    return moved + waiting


def _with_a_user(messages: Conversation) -> Conversation:
    roles = [message["role"] for message in messages]
    if "user" in roles:
        return messages
    if "system" not in roles:
        return [{"role": "user", "content": ""}, *messages]
    at = len(roles) - 1 - roles[::-1].index("system")
    return [*messages[:at], _as_user(messages[at]), *messages[at + 1 :]]


def _user_first(messages: Conversation) -> Conversation:
    at = _num_first_systems(messages)
    if at == len(messages) or messages[at]["role"] != "assistant":
        return messages
    return [*messages[:at], {"role": "user", "content": ""}, *messages[at:]]


def _users_joined(messages: Conversation) -> Conversation:
    return _rows_joined(messages, lambda one: one["role"] == "user")


def _assistants_joined(messages: Conversation) -> Conversation:
    return _rows_joined(messages, lambda one: one["role"] == "assistant")


def _rows_joined(messages: Conversation, is_of_row: Callable[[Message], bool]) -> Conversation:
    """Joins runs of messages that `is_of_row` accepts into one message each. A message with calls ends a run, because
    its results follow."""
    joined: Conversation = []
    for message in messages:
        if joined and is_of_row(message) and is_of_row(joined[-1]) and not joined[-1].get("tool_calls"):
            first = joined.pop()
            texts = {
                name: _joined([first.get(name), message.get(name)])
                for name in ("content", "reasoning_content")
                if name in first or name in message
            }
            message = first | message | texts
        joined.append(message)
    return joined


def _arguments_as_objects(messages: Conversation) -> Conversation:
    return [message | {"tool_calls": _with_objects(message["tool_calls"])} if message.get("tool_calls") else message
            for message in messages]  # fmt: skip


def _with_all_ids(messages: Conversation) -> Conversation:
    """Gives each call without an id one, and each result without an id the id of the next call."""
    given: Conversation = []
    waiting: list[Any] = []
    for number, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            calls = [
                call if call.get("id") else {**call, "id": f"call_{number}_{at}"}
                for at, call in enumerate(calls)
            ]
            message = message | {"tool_calls": calls}
            waiting = [call["id"] for call in calls]
        elif message["role"] == "tool":
            if not message.get("tool_call_id") and waiting:
                message = message | {"tool_call_id": waiting[0]}
            waiting = [one for one in waiting if one != message.get("tool_call_id")]
        given.append(message)
    return given


def _with_objects(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for call in calls:
        function = call["function"]
        if isinstance(function["arguments"], str):
            function = {**function, "arguments": as_object(function["arguments"])}
        found.append({**call, "function": function})
    return found


def _calls_written(messages: Conversation) -> Conversation:
    """Writes calls as text, for templates that show no calls. Such a conversation may have begun with another model."""
    written = []
    for message in messages:
        if message["role"] == "tool":
            message = _as_user(message)
        elif calls := message.get("tool_calls"):
            texts = [message["content"], *(_call_text(call["function"]) for call in calls)]
            message = {name: value for name, value in message.items() if name != "tool_calls"}
            message["content"] = _joined(texts)
        written.append(message)
    return written


def _call_text(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{function['name']}({text})"


def _lone_results_moved(messages: Conversation) -> Conversation:
    """Turns a tool's result without a call before it into a user message. Clients that shorten the history send results
    without their calls."""
    moved = []
    has_calls = False
    for message in messages:
        if message["role"] == "tool":
            message = message if has_calls else _as_user(message)
        elif message["role"] != "system":
            has_calls = bool(message.get("tool_calls"))
        moved.append(message)
    return moved
