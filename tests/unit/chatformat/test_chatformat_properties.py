"""Answers cut in every way, texts that are none of what they seem, and the time they take."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.chatformat.events import CallEnd, Text
from moeserve.chatformat.formats import TOOL_FORMATS
from moeserve.chatformat.json_reader import JsonReader, Status
from moeserve.chatformat.output import OutputParser
from tests.support.chats.chat_events import (
    CALL,
    SCHEMAS,
    XML,
    Answer,
    Make,
    call_xml,
    coder,
    events_of,
    hermes,
    read,
)
from tests.support.measuring.linear_time import assert_linear

PARTS = [
    *("<tool_call>", "</tool_call>", "<function=", "search>", "f>", "<parameter=", "query>", "count>", "</parameter>"),
    *("</function>", "<think>", "</think>", "\n", " ", "<", ">", "{", "}", "[", "]", '"', ":", ",", "\\", "1", "-"),
    *('{"name": "f", "arguments": {', '"a": true', "}}", "null", "text", "é", "</", "<t", CALL, XML, "\t"),
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PARTS), max_size=14).map("".join)


@settings(max_examples=80, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 60), max_size=8), st.sampled_from([hermes, coder]))
def test_however_the_text_is_cut_the_events_are_the_same(text: str, cuts: list[int], make: Make) -> None:
    pieces = []
    for cut in cuts:
        pieces.append(text[:cut])
        text = text[cut:]
    pieces.append(text)
    whole = "".join(pieces)
    expected = events_of(make, [whole])
    assert events_of(make, pieces) == expected
    assert events_of(make, list(whole)) == expected


@settings(max_examples=80, deadline=None)
@given(TEXTS, st.sampled_from([lambda: OutputParser(None, TOOL_FORMATS["hermes"].parser({})), coder]))
def test_nothing_is_lost_nor_made_up(text: str, make: Make) -> None:
    """All but white space is in the events, where it was; a whole call counts as what it says."""
    events = events_of(make, [text])
    if not any(isinstance(event, CallEnd) for event in events):
        assert "".join(Answer.of(events).text.split()) == "".join(text.split())
    rest = "".join(text.split())
    for event in events:
        if isinstance(event, Text):
            shown = "".join(event.text.split())
            assert shown in rest
            rest = rest[rest.index(shown) + len(shown) :]


PRINTABLE = st.characters(exclude_categories=["C", "Z"], include_characters=" ")  # what str.isprintable takes


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), min_size=1).filter(str.strip),
            st.tuples(
                st.text(PRINTABLE, min_size=1),
                st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.text() | st.none()), max_size=3),
            ),
        ),
        max_size=4,
    ),
    st.booleans(),
)  # fmt: skip
def test_generated_conversations_come_back(parts: list[Any], ascii_only: bool) -> None:
    text = ""
    expected = Answer()
    for part in parts:
        if isinstance(part, str):
            text += part
            expected.text += part
            continue
        name, arguments = part
        call = (
            f'{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments, ensure_ascii=ascii_only)}}}'
        )
        text += f"\n<tool_call>\n{call}\n</tool_call>\n"
        expected.calls.append((name, arguments))
    answer = read(lambda: OutputParser(None, TOOL_FORMATS["hermes"].parser({})), text)
    assert answer.calls == expected.calls
    assert "".join(answer.text.split()) == "".join(expected.text.split())


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(SCHEMAS["search"]["properties"])), st.text(max_size=30)))
def test_every_xml_value_is_a_string_or_what_its_type_says(values: dict[str, str]) -> None:
    values = {key: value for key, value in values.items() if "</parameter>" not in value}
    ((name, arguments),) = read(coder, call_xml(**values)).calls
    assert name == "search"
    assert arguments.keys() == values.keys()
    if "query" in values:
        assert arguments["query"] == values["query"]


JSON_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(), JSON_VALUES, max_size=3), st.integers(0, 3) | st.none(), st.data())
def test_json_comes_out_as_it_is_and_nothing_else_but_json_does(
    value: Any, indent: int | None, data: st.DataObject
) -> None:
    text = json.dumps(value, indent=indent)
    assert read_json(text) == (Status.DONE, text, len(text))
    at = data.draw(st.integers(0, len(text)))
    damaged = text[:at] + data.draw(st.sampled_from(",:{}[]\"\\0e.-+tn\n '")) + text[at:]
    status, shown, length = read_json(damaged)
    try:
        expected = json.loads(damaged[:length])
    except ValueError:
        expected = None
    if isinstance(expected, dict):
        assert status is Status.DONE
        assert json.loads(shown) == expected
    elif status is Status.DONE:
        assert isinstance(json.loads(shown), dict)


def read_json(text: str) -> tuple[Status, str, int]:
    """Returns the last status, the JSON, and how much was read."""
    reader = JsonReader()
    status, shown = Status.GOING, ""
    for length, char in enumerate(text, 1):
        status = reader.push(char)
        shown += reader.shown
        if status is not Status.GOING:
            return status, shown, length
    return status, shown, len(text)


@pytest.mark.parametrize("make", [hermes, coder])
@pytest.mark.parametrize(
    "unit",
    [
        '<tool_call>{"name": "f", "arguments": {"a": [',  # the longest; the slow ones are its parts and its likes
        *(pytest.param(u, marks=pytest.mark.slow) for u in ("<tool_call>", '<tool_call>{"a": "', "<think>")),
        *(pytest.param(u, marks=pytest.mark.slow) for u in ("<", "\n", "x", " <")),
        *(pytest.param(u, marks=pytest.mark.slow) for u in ("<think>\n", "<function=a>")),
    ],
)  # fmt: skip
def test_time_is_linear_in_the_text(make: Make, unit: str) -> None:
    for beginning in (
        "",
        "<think>x",
        '<tool_call>{"name": "f", "arguments": {"a": "',
        "<function=search><parameter=tags>",
    ):
        assert_linear(make, beginning, unit)
