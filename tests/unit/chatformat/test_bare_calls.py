"""Calls in JSON without the format's tags, and prose that mentions JSON."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest

from moeserve.chatformat.events import CallStart, Text
from moeserve.chatformat.formats import TOOL_FORMATS
from tests.support.chats.chat_events import Answer
from tests.support.chats.written_answers import call, parser_of, read

NAMES: Final = ("hermes", "granite", "phi4_mini", "hunyuan", "nemotron", "mistral_json")
F: Final = '{"name": "f", "arguments": {"a": "x", "opts": {"k": [1, "}\\n\\n{"]}}}'
ONE: Final[list[tuple[str, Any]]] = [("f", {"a": "x", "opts": {"k": [1, "}\n\n{"]}})]


def test_the_formats_of_calls_in_json() -> None:
    assert {name for name, one in TOOL_FORMATS.items() if one.in_json} == {*NAMES, "llama"}


@pytest.mark.parametrize(
    "written",
    [
        F,
        F.replace('{"name', '{ "name'),
        json.dumps(json.loads(F), indent=4),
        '{"type": "function", ' + F[1:],
        F.replace("arguments", "parameters"),
    ],
)
def test_llamas_calls_in_other_spellings(written: str) -> None:
    """Its calls have no tags; `{"name"` begins one wherever it stands."""
    assert read("llama", written) == Answer("", "", ONE)
    assert read("llama", f"Let me look.\n\n{written}") == Answer("Let me look.", "", ONE)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("written", "text"),
    [
        (F, ""),
        (f"\n {F} \n", ""),
        (json.dumps(json.loads(F), indent=2), ""),
        (F.replace("arguments", "parameters"), ""),
        (F.replace('"f"', '"functions.f"'), ""),
        ('{"type": "function", ' + F[1:], ""),
        (F[:-1], ""),  # the last brace is missing
        (f"[{F}]", ""),
        (f"[{F}]\n", ""),
        (f"Let me look.\n\n{F}", "Let me look."),
        (f"As {{JSON}}:\n\n[1]\n \n{F}", "As {JSON}:\n\n[1]"),
        ('{"a": 1}\n\n' + F, '{"a": 1}'),
        (f"{F}CLOSE", ""),
        (f"Let me.\n\n{F}\nCLOSE\n", "Let me."),
    ],
)
def test_a_call_without_tags(name: str, written: str, text: str) -> None:
    written = written.replace("CLOSE", TOOL_FORMATS[name].tags.close)
    assert read(name, written) == Answer(text, "", ONE)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "text",
    [
        f"{F} is how it is called.",
        f"{F}\n\nThat calls f.",
        f"The call is {F}",
        f"The call is\n{F}",
        f"```json\n{F}\n```",
        f"{F}\n\n{F}",
        f"{F}, {F}",
        F.replace('"f"', '"g"'),  # not offered
        F.replace('"f"', '"f'),
        F[:-10],
        '{"name": "f"}',
        '{"name": "f", "arguments": "x"}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "surname": {}}',
        '{"name": "fa", "arguments": {}}',
        '{"title": "f", "arguments": {}}',
        '{"name": ["f"], "arguments": {}}',
        '{"n": 1}',
        "{",
        "[",
        "[1, 2]",
        "  {x}\n\n  {y}",
        "one\n\ntwo\n\n",
        "\n\n",
        " x ",
    ],
)
def test_other_text_stays_text(name: str, text: str) -> None:
    assert read(name, text) == Answer(text)


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_was_cut_off_is_text(name: str) -> None:
    assert read(name, F, ended_by=None) == Answer(F)


@pytest.mark.parametrize("name", NAMES)
def test_behind_calls_with_tags_and_behind_reasoning(name: str) -> None:
    one = call(name, {"a": "y"})
    if name != "mistral_json":  # whose calls have no closing tag
        assert read(name, f"{one}\n\nAnd:\n\n{F}").calls == [("f", {"a": "y"}), *ONE]
    assert read(name, f"{F}\n\n{one}").calls[-1] == ("f", {"a": "y"})
    assert read(name, f"<think>\nHm.\n\n{F}\n</think>\n\n{F}").calls in (ONE, [])


def test_text_is_held_back_only_while_it_may_be_a_call() -> None:
    def shown(text: str) -> str:
        events = [event for char in text for event in parser_of("hermes").push(char)]
        parser = parser_of("hermes")
        events = [event for char in text for event in parser.push(char)]
        assert not any(isinstance(event, CallStart) for event in events)
        return "".join(event.text for event in events if isinstance(event, Text))

    assert shown('{"nam') == ""
    assert shown('{"names": 1') == '{"names": 1'
    assert shown('{"name": "other"') == '{"name": "other"'
    assert shown('{"name": "f", "arguments": {"a": "x') == ""
    assert shown('Hi.\n\n{"name": "f", "arguments": {"a": "x"}}') == "Hi."
    assert (
        shown('Hi.\n\n{"name": "f", "arguments": {"a": "x"}} is')
        == 'Hi.\n\n{"name": "f", "arguments": {"a": "x"}} is'
    )
