"""BFCL's calls in every format: rendered as the family's template does, and read back cut at every character.

The Berkeley Function-Calling Leaderboard's data are in its package (`pip install --no-deps bfcl-eval`).
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from moeserve.chatformat.values import argument_types
from tests.support.chats.chat_events import Answer, events_of
from tests.support.chats.chat_families import REASONING, answer_in, make_for
from tests.support.chats.family_templates import TEMPLATES, kept

_PACKAGE: Final = importlib.util.find_spec("bfcl_eval")
_TAGGED: Final = (
    "qwen3_coder",
    "glm45",
    "minimax_m2",
    "minimax_m3",
)  # values are plain text, and have the type of the schema
# BFCL's names of types, and Java's and JavaScript's; all others are strings here.
_TYPES: Final = {
    "dict": "object",
    "float": "number",
    "tuple": "array",
    "integer": "integer",
    "boolean": "boolean",
    "array": "array",
    "string": "string",
}

Calls = list[tuple[str, Any]]
Case = tuple[dict[str, Any], Calls]  # the tools' schemas by name, and the calls

pytestmark = [pytest.mark.slow, pytest.mark.skipif(_PACKAGE is None, reason="bfcl-eval is not installed")]


def cases() -> Iterator[Case]:
    """Yields the calls of one answer each."""
    assert _PACKAGE is not None
    assert _PACKAGE.submodule_search_locations is not None
    data = Path(_PACKAGE.submodule_search_locations[0]) / "data"
    for answers in sorted(data.glob("possible_answer/*.json")):
        questions = {one["id"]: one for one in map(json.loads, (data / answers.name).open())}
        for answer in map(json.loads, answers.open()):
            tools = questions[answer["id"]].get("function", [])
            calls = [call for call in answer["ground_truth"] if isinstance(call, dict)]
            if tools and calls:
                schemas = {tool["name"]: _schema(tool["parameters"]) for tool in tools}
                yield (
                    schemas,
                    [(name, _chosen(arguments)) for call in calls for name, arguments in call.items()],
                )


def _schema(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_schema(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    named = {"type": _TYPES.get(kind, "string")} if isinstance(kind, str) else {}
    return {name: _schema(value) for name, value in schema.items()} | named


def _chosen(arguments: dict[str, list[Any]]) -> dict[str, Any]:
    """Returns the first accepted value of each argument; those that may be left out have "" among theirs."""
    return {name: _first(values) for name, values in arguments.items() if values and values[0] != ""}


def _first(values: Any) -> Any:
    value = values[0] if isinstance(values, list) and values else values
    return _chosen(value) if isinstance(value, dict) and _all_lists(value) else value


def _all_lists(value: dict[str, Any]) -> bool:
    return all(isinstance(one, list) for one in value.values())


def _as_the_schema_says(schemas: dict[str, Any], calls: Calls) -> Calls:
    """Returns the calls without the arguments that are not of their schema's type."""
    kinds: dict[type, set[str]] = {
        str: {"string"},
        bool: {"boolean"},
        int: {"integer", "number"},
        float: {"number"},
        dict: {"object"},
        list: {"array"},
        type(None): {"null"},
    }
    return [
        (
            name,
            {
                key: value
                for key, value in arguments.items()
                if kinds[type(value)] & (argument_types(schemas.get(name, {}), key) or {"string"})
            },
        )
        for name, arguments in calls
    ]


def _in_plain_tags(calls: Calls) -> Calls:
    """The arguments without lists and objects: the text of what they hold, `25`, is a number or a string."""
    return [
        (name, {key: value for key, value in arguments.items() if not isinstance(value, (list, dict))})
        for name, arguments in calls
    ]


@pytest.mark.parametrize("name", [*TEMPLATES, "harmony", "kimi_k3", "solar_open"])
def test_calls_come_back_cut_at_every_character(name: str) -> None:
    num_calls = num_arguments = num_kept = 0
    for schemas, given in cases():
        calls = _as_the_schema_says(schemas, given) if name in _TAGGED else given
        num_calls += len(calls)
        num_arguments += sum(len(arguments) for _, arguments in given)
        num_kept += sum(len(arguments) for _, arguments in calls)
        calls = _in_plain_tags(kept(name, calls)) if name == "minimax_m3" else calls
        text = answer_in(name, REASONING, "Let me see.", calls)
        make = make_for(name, schemas)
        events = events_of(make, list(text))
        assert Answer.of(events) == Answer("Let me see.", REASONING, calls)
        assert events_of(make, [text]) == events
    assert num_calls > 3000
    assert num_kept > 0.9 * num_arguments
