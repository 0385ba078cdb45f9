"""Calls of tools, and answers from what they returned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any, Final

from training.text import requests, smalltalk
from training.text import words as w
from training.text.arithmetic import arithmetic
from training.text.example import Call, Example, Message, Tool, assistant, casual, history, user
from training.text.reading import reading
from training.text.requests import COMMON, Kind, definition, invented
from training.text.stories import story

_THOUGHT_RESULT: Final = "The tool has answered."


def tool_use(rng: Random, held_out: bool = False) -> Example:
    """One exchange with tools at hand. `held_out`: of a tool that is in no training text."""
    kind = rng.choice(requests.HELD_OUT) if held_out else _kind(rng)
    name = _name(rng, kind)
    tools = _tools(rng, kind, name)
    draw = rng.random()
    if held_out or draw < 0.5:
        return _call(rng, kind, name, tools)
    if draw < 0.58 and kind.parameters:
        return _parallel(rng, kind, name, tools)
    if draw < 0.85:
        return _result(rng, kind, name, tools)
    return _no_call(rng, tools)


def call_only(rng: Random, held_out: bool) -> Example:
    """A request that needs one call: for the evaluation."""
    kind = rng.choice(requests.HELD_OUT) if held_out else _kind(rng)
    name = _name(rng, kind)
    return _call(rng, kind, name, _tools(rng, kind, name))


def _name(rng: Random, kind: Kind) -> str:
    """One of its names, or one that says nothing, so that the description must."""
    return w.made_up(rng) if rng.random() < 0.08 else rng.choice(kind.names)


def _kind(rng: Random) -> Kind:
    return invented(rng) if rng.random() < 0.45 else rng.choice(COMMON)


def _tools(rng: Random, kind: Kind, name: str) -> tuple[Tool, ...]:
    """The tool in question among others, whose names and purposes are different ones."""
    others = [k for k in rng.sample(COMMON, rng.choice((0, 0, 1, 1, 2, 3, 10))) if not _alike(k, kind)]
    if rng.random() < 0.4:
        others.append(invented(rng))
    options = list(dict.fromkeys(parameter for parameter, _ in kind.optional))
    defined = {name: definition(rng, kind, name, options if rng.random() < 0.5 else ())}
    for other in others:
        other_name = rng.choice(other.names)
        defined.setdefault(other_name, definition(rng, other, other_name))
    tools = list(defined.values())
    rng.shuffle(tools)
    return tuple(tools)


_ALIKE: Final = ({"get_weather"}, {"add", "subtract", "multiply", "calculator"}, {"send_message", "send_email", "translate"},
                 {"search", "read_file", "run_command", "play_song"}, {"turn_on", "set_temperature"},
                 {"now", "get_time", "set_timer", "add_event"}, {"buy", "convert_currency"})  # fmt: skip


def _alike(a: Kind, b: Kind) -> bool:
    """Whether a request for one could mean the other."""
    if a is b or set(a.names) & set(b.names):
        return True
    arithmetic_tools = {"add", "subtract", "multiply"}
    if a.names[0] in arithmetic_tools and b.names[0] in arithmetic_tools:
        return False  # these are told apart by the sign
    return any({a.names[0], b.names[0]} <= group for group in _ALIKE)


def _request(rng: Random, kind: Kind, name: str, tools: Sequence[Tool]) -> tuple[str, Call]:
    values = {p.name: p.draw(rng) for p in kind.parameters}
    question = rng.choice(kind.asks).format(**{key: _said(value) for key, value in values.items()})
    options = [option for option in kind.optional if option[0].name in _properties(tools, name)]
    if options and rng.random() < 0.4:
        parameter, how = rng.choice(options)
        values[parameter.name] = parameter.draw(rng)
        question = f"{question} {how.format(**values)}"
    return question, Call(name, values)


def _properties(tools: Sequence[Tool], name: str) -> dict[str, Any]:
    (function,) = (tool["function"] for tool in tools if tool["function"]["name"] == name)
    properties: dict[str, Any] = function["parameters"]["properties"]
    return properties


def _said(value: Any) -> str:
    if isinstance(value, list):
        return w.joined(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _call(rng: Random, kind: Kind, name: str, tools: tuple[Tool, ...]) -> Example:
    question, call = _request(rng, kind, name, tools)
    return Example((user(casual(rng, question)),), _why([call]), calls=(call,), tools=tools)


def _why(calls: Sequence[Call]) -> str:
    return f"I call {w.joined([call.name for call in calls])}."


def _parallel(rng: Random, kind: Kind, name: str, tools: tuple[Tool, ...]) -> Example:
    question, calls = _two_requests(rng, kind, name, tools)
    return Example((user(question),), _why(calls), calls=tuple(calls), tools=tools)


def _two_requests(rng: Random, kind: Kind, name: str, tools: Sequence[Tool]) -> tuple[str, list[Call]]:
    """The same tool twice, in one breath."""
    (parameter, *more) = kind.parameters
    asks = [text for text in kind.asks if text.count("{") == 1 and text.rstrip("?.").endswith("}")]
    first, call = _request(rng, kind, name, tools)
    if not more and asks and parameter.schema["type"] == "string":
        values = [parameter.draw(rng), parameter.draw(rng)]
        question = rng.choice(asks).format(**{parameter.name: f"{values[0]} and {values[1]}"})
        return question, [Call(name, {parameter.name: value}) for value in values]
    second, other = _request(rng, kind, name, tools)
    return f"{first} {rng.choice(('And', 'Then', 'Also:'))} {second}", [call, other]


def _result(rng: Random, kind: Kind, name: str, tools: tuple[Tool, ...]) -> Example:
    """The tool has been called: say what it returned."""
    if rng.random() < 0.2 and kind.parameters:
        question, calls = _two_requests(rng, kind, name, tools)
    else:
        question, call = _request(rng, kind, name, tools)
        calls = [call]
    results = [_failure(rng) if rng.random() < 0.06 else kind.result(rng) for _ in calls]
    asked = assistant("", calls)
    if rng.random() < 0.2:  # clients may send back what was thought
        asked["reasoning_content"] = _why(calls)
    answers: list[Message] = [{"role": "tool", "content": result} for result in results]
    return Example((user(question), asked, *answers), _THOUGHT_RESULT, say_all(results), tools=tools)


def _failure(rng: Random) -> str:
    error = rng.choice(("not found", "timeout", "unknown city", "permission denied", w.phrase(rng, 1, 4)))
    return json.dumps({"error": error}, ensure_ascii=False)


def say_all(results: Sequence[str]) -> str:
    if len(results) == 1:
        return say(results[0])
    return "\n".join(f"{i}. {say(result)}" for i, result in enumerate(results, 1))


def say(result: str) -> str:
    """What a tool returned, in a sentence."""
    try:
        value = json.loads(result)
    except ValueError:
        value = result
    if value in ("ok", "done", "success", "sent", {"status": "ok"}, {"ok": True}):
        return "Done."
    if isinstance(value, dict) and "error" in value:
        return f"The tool failed: {value['error']}."
    if isinstance(value, dict):
        parts = w.joined([f"the {key} is {_said(item)}" for key, item in value.items()])
        return parts[0].upper() + parts[1:] + "."
    return f"The result is: {result}"


def _no_call(rng: Random, tools: tuple[Tool, ...]) -> Example:
    """Something that is answered without the tools at hand."""
    arguments = [set(tool["function"]["parameters"]["properties"]) for tool in tools]
    calculates = any({"a", "b"} <= names or "expression" in names for names in arguments)
    kinds = (
        [smalltalk.talk, reading, story]
        if calculates
        else [smalltalk.talk, reading, story, arithmetic, arithmetic]
    )
    if not any("query" in names for names in arguments):
        kinds.append(smalltalk.knowledge)
    example = rng.choice(kinds)(rng)
    return Example(example.messages, example.thought, example.answer, tools=tools)


def conversation_with_tools(rng: Random) -> Example:
    """A tool was called and has been talked about; now something else is asked, with the same tools."""
    kind = _kind(rng)
    name = _name(rng, kind)
    tools = _tools(rng, kind, name)
    if rng.random() < 0.4:
        earlier = history(_no_call(rng, tools))
    else:
        earlier = history(_result(rng, kind, name, tools))
    following = _call(rng, kind, name, tools) if rng.random() < 0.7 else _no_call(rng, tools)
    return following.after(earlier)
