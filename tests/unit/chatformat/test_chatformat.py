"""Answers taken apart: known texts, every way of cutting them, and texts that are none of what they seem."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeserve.chatformat.events import (
    CallArguments,
    CallBroken,
    CallStart,
    Event,
    Text,
)
from moeserve.chatformat.formats import TOOL_FORMATS, tool_format
from moeserve.chatformat.reasoning import (
    ERNIE,
    HUNYUAN,
    HUNYUAN3,
    MISTRAL,
    QWEN3,
    ReasoningParser,
    ReasoningTags,
    reasoning_tags,
)
from tests.support.chats.chat_events import CALL, XML, Answer, call_xml, coder, events_of, hermes, read

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
        '<tool_call>{"name": "f", "n": 1}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1,, "b": 2}}</tool_call> more',
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
    events = events_of(hermes, ['Hm. <tool_call>{"name": "f", "arguments": {"a": 1, ;}} x'])
    assert events == [
        Text("Hm."),
        CallStart(0, "f"),
        CallArguments(0, '{"a": 1'),
        CallBroken(0, ' <tool_call>{"name": "f", "arguments": {"a": 1, ', ", "),
        Text(";}} x"),
    ]
    events = events_of(hermes, ['<tool_call>{"name": "f", "arguments": {} , "k": {'])
    assert events[-1] == CallBroken(0, '<tool_call>{"name": "f", "arguments": {} , "k": {', ' , "k": {')


def test_after_a_malformed_call_the_next_one_is_found() -> None:
    assert read(hermes, f"<tool_call>\n{CALL}") == Answer("", "", [F])
    assert read(hermes, f'<tool_call>{{"a": {CALL}') == Answer('<tool_call>{"a": ', "", [F])
    assert read(coder, f"<tool_call>\n{XML}").calls == [SEARCH]


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
        (call_xml(count="7.0", ratio="7.0"), Answer("", "", [("search", {"count": 7, "ratio": 7.0})])),
        (call_xml(count="1e3"), Answer("", "", [("search", {"count": 1000})])),
        (
            call_xml(tags="['a', None, True, \"it's\", 1]"),
            Answer("", "", [("search", {"tags": ["a", None, True, "it's", 1]})]),
        ),
        (call_xml(tags='["a",\n]'), Answer("", "", [("search", {"tags": ["a"]})])),
        (
            call_xml(filters="{'a': {'b': [None, False]}}"),
            Answer("", "", [("search", {"filters": {"a": {"b": [None, False]}}})]),
        ),
        (
            call_xml(tags="[a, b]", filters="f()"),
            Answer("", "", [("search", {"tags": "[a, b]", "filters": "f()"})]),
        ),
        (call_xml(query="['a', None]"), Answer("", "", [("search", {"query": "['a', None]"})])),
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
        "<tool_call><function=search> </param",
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


def test_formats_are_read_from_the_template(tiny_model: Path) -> None:
    from moeserve.models.sources.gguf import open_gguf

    template = open_gguf(tiny_model).metadata.require_str("tokenizer.chat_template")
    assert tool_format(template) is TOOL_FORMATS["hermes"]
    assert reasoning_tags(template) is QWEN3
    coders = "{{ '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}"
    assert tool_format(coders) is TOOL_FORMATS["qwen3_coder"]
    assert reasoning_tags(coders) is None
    assert tool_format("{{ messages }}") is None


@pytest.mark.parametrize(
    ("tags", "is_open", "text", "thought", "answer"),
    [
        (HUNYUAN, False, "<think>\nhm\n</think>\n<answer>\nHi <b>\n\nyou\n</answer>", "hm", "Hi <b>\n\nyou"),
        (MISTRAL, False, "[THINK]hm [1] x[/THINK]Hi [THINK]", "hm [1] x", "Hi [THINK]"),
        (HUNYUAN3, True, "hm</think></think:opensource>Hi", "hm</think>", "Hi"),
        (ERNIE, True, "hm\n</think>\n\n<response>\nHi\n</response>\n", "hm", "Hi"),
        (ERNIE, True, "hm\n</think>\n\n\n<tool_call>", "hm", "<tool_call>"),
        (ERNIE, True, "hm\n</think>\n<response>\nHi\n</response>\n\n<tool_call>", "hm", "Hi<tool_call>"),
        (HUNYUAN, False, "<answer>\nHi\n</answer>", "", "Hi"),
        (HUNYUAN, False, "<answer>Hi\n</answ\n", "", "Hi\n</answ\n"),
        (HUNYUAN, False, " <answers> are </answer>", "", " <answers> are </answer>"),
        (HUNYUAN, False, "<ans", "", "<ans"),
        (QWEN3, False, "<answer>\nHi\n</answer>", "", "<answer>\nHi\n</answer>"),
    ],
)
def test_tags_around_the_answer_belong_to_some_formats(
    tags: ReasoningTags, is_open: bool, text: str, thought: str, answer: str
) -> None:
    for cut in (1, 2, len(text)):
        parser, events = ReasoningParser(is_open, tags), []
        for at in range(0, len(text), cut):
            events += parser.push(text[at : at + cut])
        assert Answer.of(events + parser.finish()) == Answer(answer, thought, [])


def test_a_template_says_which_tags_its_answers_have() -> None:
    assert reasoning_tags("<think></think><answer>") is HUNYUAN
    assert reasoning_tags("<think></think><response>") is ERNIE
    assert reasoning_tags("[THINK][/THINK]") is MISTRAL
    assert reasoning_tags("{% set t = ':opensource' %}{{ '</think{}>'.format(t) }}") is HUNYUAN3
    assert reasoning_tags("<think></think><tool_response>") is QWEN3
