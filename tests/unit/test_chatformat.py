"""Answers taken apart: known texts, every way of cutting them, and texts that are none of what they seem."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.chatformat import detect
from moeserve.chatformat.events import (
    CallArguments,
    CallBroken,
    CallEnd,
    CallStart,
    Event,
    Reasoning,
    Text,
)
from moeserve.chatformat.hermes import HermesBody
from moeserve.chatformat.json_scanner import JsonScanner, Status
from moeserve.chatformat.output import OutputParser, joined
from moeserve.chatformat.qwen3_coder import FUNCTION, Qwen3CoderBody
from moeserve.chatformat.reasoning import ReasoningParser
from moeserve.chatformat.tool_calls import ToolCallParser

SCHEMAS: dict[str, Any] = {
    "search": {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "count": {"type": "integer"},
            "ratio": {"type": "number"},
            "exact": {"type": "boolean"},
            "filters": {"type": "object"},
            "tags": {"type": "array"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "mode": {"enum": ["fast", 2, None]},
        },
    }
}
Make = Callable[[], OutputParser]


def hermes(is_open: bool = False) -> OutputParser:
    return OutputParser(ReasoningParser(is_open), ToolCallParser(HermesBody))


def coder() -> OutputParser:
    return OutputParser(None, ToolCallParser(lambda index: Qwen3CoderBody(index, SCHEMAS), FUNCTION))


def events_of(make: Make, pieces: list[str]) -> list[Event]:
    parser = make()
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined(events + parser.finish())


@dataclass
class Answer:
    """What a client that waits for the whole answer makes of the events."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, events: list[Event]) -> Answer:
        answer = cls()
        arguments = ""
        name = ""
        for event in events:
            match event:
                case Text(text):
                    answer.text += text
                case Reasoning(text):
                    answer.reasoning += text
                case CallStart(_, name):
                    arguments = ""
                case CallArguments(_, text):
                    arguments += text
                case CallEnd():
                    answer.calls.append((name, json.loads(arguments)))
                case CallBroken(_, raw, _):
                    answer.text += raw
        return answer


def read(make: Make, text: str) -> Answer:
    return Answer.of(events_of(make, [text]))


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, {"b": "}</tool_call>\\""}]}}\n</tool_call>'
F = ("f", {"a": [1, {"b": '}</tool_call>"'}]})


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", Answer()),
        ("  Hello,\n world \n", Answer("  Hello,\n world \n")),
        ("a < b <too> <tool_calls>", Answer("a < b <too> <tool_calls>")),
        (CALL, Answer("", "", [F])),
        (f"Let me see.\n\n{CALL}", Answer("Let me see.", "", [F])),
        (f"{CALL}\n{CALL}", Answer("", "", [F, F])),
        (f"{CALL}\n\nDone. {CALL}\n", Answer("Done.", "", [F, F])),
        (CALL.removesuffix("\n</tool_call>"), Answer("", "", [F])),
        (CALL.removesuffix("call>"), Answer("</tool_", "", [F])),
        (
            '<tool_call>{"arguments": {"x": 1e2}, "name": "g"}</tool_call>',
            Answer("", "", [("g", {"x": 100.0})]),
        ),
        ('<tool_call> {"name":"g","arguments":{}} </tool_call>', Answer("", "", [("g", {})])),
        ('<tool_call>{"name": "\\u00e9", "arguments": {}, "id": 3}</tool_call>', Answer("", "", [("é", {})])),
        ("<think>\nHm.\n\nYes\n</think>\n\nHi", Answer("Hi", "Hm.\n\nYes")),
        ("\n<think></think>Hi", Answer("Hi", "")),
        (f"<think>\n{CALL}\n</think>\n\n{CALL}", Answer("", CALL, [F])),
        ("<think>\nHm <b", Answer("", "Hm <b")),
        ("<think>\n\n</th\n", Answer("", "</th")),
        ("<thinking>x</thinking> <think>", Answer("<thinking>x</thinking> <think>")),
        ("Hi <think>x</think>", Answer("Hi <think>x</think>")),
    ],
)
def test_hermes_answers(text: str, answer: Answer) -> None:
    assert read(hermes, text) == answer


def test_a_thought_that_the_prompt_opened() -> None:
    assert read(lambda: hermes(is_open=True), "\nHm\n</think>\n\nHi") == Answer("Hi", "Hm")
    assert read(lambda: hermes(is_open=True), "Hm") == Answer("", "Hm")


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        " x <tool_call>\n",
        "<tool_call>\nf(1)\n</tool_call>",
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call> more',
        '<tool_call>{"name": "f", "arguments": {"a": tru</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "x',
        '<tool_call>{"name": "f", "arguments": {}} and {"b": 1}',
        '<tool_call>{"name": "f", "arguments": {}, and more',
        '<tool_call>{"arguments": {"a": ' + "9" * 5000 + '}, "name": "f"}</tool_call>',
    ],
)
def test_a_malformed_call_is_text_and_nothing_is_lost(text: str) -> None:
    answer = read(hermes, text)
    if answer.calls:
        assert answer == Answer('and {"b": 1}', "", [("f", {})])
    else:
        assert answer == Answer(text)


def test_who_has_shown_a_call_that_breaks_shows_the_rest_as_text() -> None:
    events = events_of(hermes, ['Hm. <tool_call>{"name": "f", "arguments": {"a": 1,}} x'])
    assert events == [
        Text("Hm."),
        CallStart(0, "f"),
        CallArguments(0, '{"a": 1,'),
        CallBroken(0, ' <tool_call>{"name": "f", "arguments": {"a": 1,', ""),
        Text("}} x"),
    ]
    events = events_of(hermes, ['<tool_call>{"name": "f", "arguments": {} , "k": {'])
    assert events[-1] == CallBroken(0, '<tool_call>{"name": "f", "arguments": {} , "k": {', ' , "k": {')


def test_after_a_malformed_call_the_next_one_is_found() -> None:
    assert read(hermes, f"<tool_call>\n{CALL}") == Answer("<tool_call>\n", "", [F])
    assert read(hermes, f'<tool_call>{{"a": {CALL}') == Answer('<tool_call>{"a": ', "", [F])
    assert read(coder, f"<tool_call>\n{XML}").calls == [SEARCH]


XML = """<tool_call>
<function=search>
<parameter=query>
two
 "lines" </parameter> <
</parameter>
<parameter=count>
7
</parameter>
<parameter=ratio>-2.5e1</parameter>
<parameter=exact>
True
</parameter>
<parameter=filters>
{"a": [null]}
</parameter>
<parameter=tags>
["x"]
</parameter>
<parameter=note>
null
</parameter>
<parameter=mode>
2
</parameter>
<parameter=other>
3
</parameter>
</function>
</tool_call>""".replace(' "lines" </parameter> <\n', ' "lines" </param> <\n')
SEARCH = (
    "search",
    {
        "query": 'two\n "lines" </param> <',
        "count": 7,
        "ratio": -25.0,
        "exact": True,
        "filters": {"a": [None]},
        "tags": ["x"],
        "note": None,
        "mode": 2,
        "other": "3",
    },
)


def call_xml(**values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=search>\n{parameters}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (XML, Answer("", "", [SEARCH])),
        (f"Well.\n{XML}\n{XML}\n", Answer("Well.", "", [SEARCH, SEARCH])),
        (XML.removeprefix("<tool_call>\n"), Answer("", "", [SEARCH])),
        ("<tool_call><function=nothing></function></tool_call>", Answer("", "", [("nothing", {})])),
        (call_xml(query=""), Answer("", "", [("search", {"query": ""})])),
        (call_xml(query="\n\n"), Answer("", "", [("search", {"query": "\n\n"})])),
        (call_xml(query="null"), Answer("", "", [("search", {"query": "null"})])),
        (call_xml(query="<tool_call>\u2028é"), Answer("", "", [("search", {"query": "<tool_call>\u2028é"})])),
        (call_xml(count="seven"), Answer("", "", [("search", {"count": "seven"})])),
        (call_xml(count="7.5"), Answer("", "", [("search", {"count": "7.5"})])),
        (call_xml(ratio="NaN", exact="true"), Answer("", "", [("search", {"ratio": "NaN", "exact": True})])),
        (call_xml(ratio="1e999"), Answer("", "", [("search", {"ratio": "1e999"})])),
        (call_xml(note="nil"), Answer("", "", [("search", {"note": "nil"})])),
        (call_xml(mode="fast"), Answer("", "", [("search", {"mode": "fast"})])),
        (call_xml(filters='{"a": "\\ud800"}'), Answer("", "", [("search", {"filters": {"a": "\ud800"}})])),
        ("a <function> <b", Answer("a <function> <b")),
    ],
)
def test_qwen3_coder_answers(text: str, answer: Answer) -> None:
    assert read(coder, text) == answer


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nsearch",
        "<tool_call><function=>",
        "<function=a\nb>",
        "<function=search>\n<parameter=query>\nabc",
        "<function=search>\n<parameter=count>\n12\n</para",
        "<tool_call><function=search>\n<parameter=",
        "<tool_call><function=search> oh",
        "<tool_call><function=search></tool_call>",
    ],
)
def test_a_malformed_xml_call_is_text_and_nothing_is_lost(text: str) -> None:
    assert read(coder, text) == Answer(text)


def test_arguments_come_in_pieces_as_they_are_written() -> None:
    for make, text in ((hermes, '<tool_call>{"name": "f", "arguments": {"q": "some text'), (coder, XML[:70])):
        parser = make()
        seen: list[Event] = []
        for char in text:
            seen += parser.push(char)
        assert isinstance(seen[0], CallStart)
        assert len([event for event in seen if isinstance(event, CallArguments)]) > 5
        written = "".join(event.text for event in seen if isinstance(event, CallArguments))
        assert written == '{"q": "some text' or written.startswith('{"query": "two\\n \\"lin')


# ---------------------------------------------------------------- every way of cutting

PARTS = [
    *("<tool_call>", "</tool_call>", "<function=", "search>", "f>", "<parameter=", "query>", "count>", "</parameter>"),
    *("</function>", "<think>", "</think>", "\n", " ", "<", ">", "{", "}", "[", "]", '"', ":", ",", "\\", "1", "-"),
    *('{"name": "f", "arguments": {', '"a": true', "}}", "null", "text", "é", "</", "<t", CALL, XML, "\t"),
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PARTS), max_size=14).map("".join)


@settings(max_examples=200, deadline=None)
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


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.sampled_from([lambda: OutputParser(None, ToolCallParser(HermesBody)), coder]))
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


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), min_size=1).filter(str.strip),
            st.tuples(
                st.text(min_size=1).filter(lambda name: name.isprintable()),
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
    answer = read(lambda: OutputParser(None, ToolCallParser(HermesBody)), text)
    assert answer.calls == expected.calls
    assert "".join(answer.text.split()) == "".join(expected.text.split())


@settings(max_examples=100, deadline=None)
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


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(), JSON_VALUES, max_size=3), st.integers(0, 3) | st.none(), st.data())
def test_the_scanner_takes_json_and_notices_what_is_none(
    value: Any, indent: int | None, data: st.DataObject
) -> None:
    text = json.dumps(value, indent=indent)
    assert scan(text) == (Status.DONE, len(text))
    at = data.draw(st.integers(0, len(text)))
    damaged = text[:at] + data.draw(st.sampled_from(',:{}[]"\\0e.-+tn\n ')) + text[at:]
    status, length = scan(damaged)
    try:
        valid = isinstance(json.loads(damaged[:length]), dict)
    except ValueError:
        valid = False
    assert (status is Status.DONE) == valid


def scan(text: str) -> tuple[Status, int]:
    scanner = JsonScanner()
    status = Status.GOING
    for length, char in enumerate(text, 1):
        status = scanner.push(char)
        if status is not Status.GOING:
            return status, length
    return status, len(text)


@pytest.mark.parametrize("make", [hermes, coder])
@pytest.mark.parametrize(
    "unit",
    [
        *("<tool_call>", '<tool_call>{"a": "', "<", "\n", "<think>", "<think>\n", "x", "<function=a>", " <"),
        '<tool_call>{"name": "f", "arguments": {"a": [',
    ],
)  # fmt: skip
def test_time_is_linear_in_the_text(make: Make, unit: str) -> None:
    def seconds(beginning: str, count: int) -> float:
        text = beginning + unit * (count // len(unit))
        start = time.thread_time()
        events_of(make, [text[i : i + 5] for i in range(0, len(text), 5)])
        return time.thread_time() - start

    for beginning in (
        "",
        "<think>x",
        '<tool_call>{"name": "f", "arguments": {"a": "',
        "<function=search><parameter=tags>",
    ):
        short = min(seconds(beginning, 6_000) for _ in range(2))
        assert seconds(beginning, 24_000) < 9 * short + 0.05  # four times the text; quadratic would be 16 times


def test_formats_are_read_from_the_template(tiny_model: Path) -> None:
    from moeserve.models.gguf import open_gguf

    template = open_gguf(tiny_model).metadata.require_str("tokenizer.chat_template")
    assert detect.tool_format(template) == "hermes"
    assert detect.thinks(template)
    coders = "{{ '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}"
    assert detect.tool_format(coders) == "qwen3_coder"
    assert not detect.thinks(coders)
    assert detect.tool_format("{{ messages }}") is None
