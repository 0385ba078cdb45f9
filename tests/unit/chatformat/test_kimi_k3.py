"""Tests of the parser of Kimi-K3's answers: whole, cut anywhere, and malformed. Public reports of malformed ones:
sglang#32567, sglang#34604, sglang#37581, vllm#50627, vllm#51399, vllm#53246, vllm#57353, smg#1983, senpi#465,
xgrammar#806."""

from __future__ import annotations

import time
import zlib
from itertools import pairwise
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.chatformat.events import CallArguments, CallBroken, CallEnd, CallStart, Event, Reasoning, Text
from moeserve.chatformat.kimi_k3 import KimiK3Parser
from moeserve.chatformat.output import joined
from tests.support.chats.chat_events import Answer
from tests.support.chats.kimi_k3_template import rendered_in_sections
from tests.support.measuring.linear_time import assert_linear

SCHEMAS: Final[dict[str, Any]] = {
    "f": {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "b": {"type": "string"},
            "n": {"type": "integer"},
            "opts": {"type": "object"},
            "list": {"type": "array"},
        },
    },
    "now": {"type": "object", "properties": {}},
}


def tags(short: str) -> str:
    """Writes `[name]` and `[/name]` as tags."""
    return short.replace("[/", "<|close|>").replace("[", "<|open|>").replace("]", "<|sep|>")


def parser(
    begun: str = "[think]", reads_calls: bool = True, separates_reasoning: bool = True
) -> KimiK3Parser:
    return KimiK3Parser(tags(begun), reads_calls, separates_reasoning, SCHEMAS)


def read(short: str, begun: str = "[think]", *, ended_by: str | None = "", **options: bool) -> Answer:
    """Reads the text whole, character by character and cut in two at some 60 places, as an answer that the model itself
    has ended."""
    text = tags(short)

    def events(*pieces: str) -> list[Event]:
        reader = parser(begun, **options)
        return joined([*(one for piece in pieces for one in reader.push(piece)), *reader.finish(ended_by)])

    whole = events(text)
    assert events(*text) == whole
    step = 1 + len(text) // 60
    for at in range(1 + zlib.crc32(text.encode()) % step, len(text), step):
        assert events(text[:at], text[at:]) == whole
    return Answer.of(whole)


A: Final = '[argument key="a" type="string"]x[/argument]'
B: Final = '[argument key="b" type="string"]y[/argument]'
CALL: Final = f'[call tool="f" index="1"]{A}[/call]'
F_X: Final[list[tuple[str, Any]]] = [("f", {"a": "x"})]


def test_a_whole_answer() -> None:
    arguments = {"a": 'two\n "lines" <b>', "n": 3, "opts": {"k": [None, 1.5]}, "list": ["x"], "b": ""}
    answer = rendered_in_sections("Hm.", "Let me see.", [("f", arguments), ("now", {})])
    (thought, *_) = begun = answer.partition("<|open|>think<|sep|>")
    assert not thought
    reader = parser()
    events = [event for char in begun[2] for event in reader.push(char)]
    read_back = Answer.of(events + reader.finish(""))
    assert read_back == Answer("Let me see.", "Hm.", [("f", arguments), ("now", {})])
    assert read("Hi[/response][/message]", "[response]") == Answer("Hi")
    assert read("Hi[/response][/message]<|end_of_msg|>", "[response]The dog") == Answer("Hi")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Hm<|close|>think[response]Hi[/response][/message]", Answer("Hi", "Hm")),
        ("Hm<|close|>think<|open|>response[/response]<|open|>tools" + CALL, Answer("", "Hm", F_X)),
        ("Hm[response]Hi[/response]", Answer("Hi", "Hm")),
        (f"Hm[tools]{CALL}[/tools]", Answer("", "Hm", F_X)),
        # The end of the reasoning is lost in the text: only the closing tag of a response is left.
        (f"Hm. Hi[/response][tools]{CALL}[/tools][/message]", Answer("", "Hm. Hi", F_X)),
        (f"Hm[/message][tools]{CALL}", Answer("", "Hm", F_X)),
        ("[think]Hm[/think][response][response]Hi[/response]", Answer("Hi", "Hm")),
        ("Hm[/think]Hi[/response][/message]", Answer("Hi", "Hm")),
        ("Hm[/think]\n[response]Hi[/response]\n\n[/message]\n", Answer("Hi", "Hm")),
        ("Hm[/think]<|sep|>[/think][response]Hi", Answer("Hi", "Hm")),
        ("Hm[/think][response]Hi[/message]", Answer("Hi", "Hm")),
        (f"Hm[/think][response]Hi[tools]{CALL}[/tools]", Answer("Hi", "Hm", F_X)),
        (f"Hm[/think][response]Hi{CALL}[/tools]", Answer("Hi", "Hm", F_X)),
        ("Hm[/think][response]Hi[/response][response]Ho[/response]", Answer("Hi\n\nHo", "Hm")),
        ("Hm[/think][message role='assistant'][response]Hi[/ response ]", Answer("Hi", "Hm")),
    ],
)
def test_sections_whose_tags_are_missing(text: str, answer: Answer) -> None:
    assert read(text) == answer


@pytest.mark.parametrize(
    ("calls", "found"),
    [
        (f'[tools][call tool="f" index="1"]{A}{B}[/tools]', [("f", {"a": "x", "b": "y"})]),
        ('[tools][call tool="f" index="1"][argument key="a" type="string"]x[/call][/tools]', F_X),
        ('[tools][call tool="f" index="1"][argument key="a" type="string"]x[/tools][/message]', F_X),
        ('[tools][call tool="f"][argument key="a" type="string"]x<|close|>argument<|close|>call', F_X),
        (
            f'[tools][call tool="f"][argument key="b" type="string"]y{A}[/call]',
            [("f", {"b": "y", "a": "x"})],
        ),
        ('[tools][call tool="f" index="1"][argument key="a"]x[/argument][/call]', F_X),
        ("[tools][call index='1' tool='f'][argument type='string' key='a']x[/argument][/call]", F_X),
        ('[tools][call tool="functions.f" index="1"][argument key="a"]x[/ argument ][/call ]', F_X),
        (f"[tools]\n{CALL}\n[/tools]\n{CALL}", F_X * 2),
        (f"[tools]{CALL}{CALL[: -len('[/call]')]}[call tool='now'][/call]", [*F_X * 2, ("now", {})]),
        ('[tools][call tool="f"][json type="object"]{"a": "x"}[/json][/call]', F_X),
        ('[tools][call tool="f"]{"a": "x"}[/call][/tools]', F_X),
        ('[tools][call tool="f"][json]{"a": "x"[/json][/call][/tools]', F_X),
        ('[tools][call tool="f"][argument key="a" type="string"]x<|close|><|sep|>[/call]', F_X),
        ('[tools][call tool="f"][argument key="n" type="number"]3.0[/argument][/call]', [("f", {"n": 3})]),
        ('[tools][call tool="f"][argument key="n" type="string"]3[/argument][/call]', [("f", {"n": 3})]),
        ('[tools][call tool="f"][argument key="a" type="number"]3[/argument][/call]', [("f", {"a": "3"})]),
        (
            '[tools][call tool="f"][argument key="opts" type="object"]{\'k\': None}[/argument]',
            [("f", {"opts": {"k": None}})],
        ),
        ('[tools][call tool="f"][argument key="n" type="number"]many[/argument]', [("f", {"n": "many"})]),
        (
            '[tools][call tool="a&amp;b"][argument key="&quot;k&quot;" type="null"]null[/argument]',
            [("a&b", {'"k"': None})],
        ),
        ('[tools][call tool="g"][argument key="k" type="integer"]3[/argument][/call]', [("g", {"k": 3})]),
    ],
)
def test_calls_as_models_write_them(calls: str, found: list[tuple[str, Any]]) -> None:
    assert read("Hm[/think][response]Hi[/response]" + calls) == Answer("Hi", "Hm", found)


@pytest.mark.parametrize(
    "calls",
    [
        '[call index="1"][/call]',
        '[call tool="f"][argument key="a"]x<|open|>call',
        '[call tool="f"]now[/call]',
        '[call tool="f"]{"a": x y, }[/call]',
        f'[call tool="f"]{A}[json]{{}}[/json][/call]',
    ],
)
def test_malformed_calls_are_text(calls: str) -> None:
    answer = read(f"[tools]{calls}", "[response]")
    assert answer.text == tags(calls)
    assert not answer.calls


def test_tags_that_fit_nowhere_are_text() -> None:
    prose = "say [foo], [/bar], <|open|> and <|close|>response of <|sep|> [think] <|op"
    assert read(f"Hm[/think][response]{prose}[/response]") == Answer(tags(prose), "Hm")
    thought = prose.replace("[think]", "")
    assert read(f"{thought}[/think]Hi") == Answer("Hi", tags(thought))
    value = '[response], [argument key="z"], [argument key="a"], [call tool="f"] and [/think]'
    call = f'[tools][call tool="f"][argument key="a" type="string"]{value}[/argument][/call]'
    assert read(call, "[response]").calls == [("f", {"a": tags(value)})]
    in_json = '[tools][call tool="f"][json]{"a": "[/call]"}[/json][/call]'
    assert read(in_json, "[response]").calls == [("f", {"a": tags("[/call]")})]
    unknown = 'Hm [call tool="g"][/call] so[/think]Hi'  # of no offered tool
    assert read(unknown) == Answer("Hi", tags('Hm [call tool="g"][/call] so'))
    long = f'<|open|>call tool="{"x" * 2000}'
    assert read(long, "[response]") == Answer(long)


def test_an_answer_that_was_cut_off_implies_nothing() -> None:
    assert read("Hm", ended_by=None) == Answer("", "Hm")
    assert read("Hm<|close|>thi", ended_by=None) == Answer("", "Hm")
    begun = f'[call tool="f" index="1"]{A}[argument key="n" type="number"]3'
    for call in (begun, begun + "<|clo", begun + "[/argument", begun + "[/argument]", begun[:14]):
        answer = read("Hm[/think][tools]" + call, ended_by=None)
        assert answer == Answer(tags(call), "Hm")
    reader = parser("[response]")
    events = [*reader.push(tags(f"[tools]{begun}")), *reader.finish(None)]
    assert [type(event) for event in events] == [CallStart, CallArguments, CallBroken]
    assert isinstance(events[1], CallArguments)
    assert events[1].text == '{"a": "x", "n": '
    assert isinstance(events[2], CallBroken)
    assert events[2].rest == "3"  # what no event has shown
    in_json = '[tools][call tool="f"]{"a": "x",'
    reader = parser("[response]")
    (*_, broken) = [*reader.push(tags(in_json)), *reader.finish(None)]
    assert isinstance(broken, CallBroken)
    assert broken.rest == ","


def test_without_calls_and_thoughts_an_answer_is_text() -> None:
    whole = f"[tools]{CALL}[/tools]"
    plain = read(f"Hm[/think][response]Hi[/response]{whole}", reads_calls=False, separates_reasoning=False)
    assert plain == Answer("Hm\n\nHi" + tags(whole))
    apart = read(f"Hm[/think]Hi[/response]{whole}", separates_reasoning=False)
    assert apart.calls == F_X
    assert not apart.reasoning


def test_where_the_answer_thinks() -> None:
    reader, states = parser(), []
    for piece in ("Hm", "[/think]", "[response]Hi <", "b"):
        states.append((reader.is_thinking, reader.push(tags(piece))))
    assert states == [(True, [Reasoning("Hm")]), (True, []), (False, [Text("Hi ")]), (False, [Text("<b")])]
    assert not parser("[response]").is_thinking
    assert not parser(separates_reasoning=False).is_thinking


PIECES: Final = [
    *("[think]", "[/think]", "[response]", "[/response]", "[tools]", "[/tools]", "[/message]", "<|sep|>", "<|open|>"),
    *('[call tool="f" index="1"]', "[/call]", '[argument key="a" type="string"]', "[/argument]", "[json]", "[/json]"),
    *('{"a": "x"}', '{"a"', "text", " \n", "<|cl", "<|end_of_msg|>", "<|close|>", "call", "3"),
    *("<|open|>call ", '[argument key="n"]'),
]  # fmt: skip


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), max_size=12), st.lists(st.integers(0, 120), max_size=4), st.booleans()
)
def test_any_text_is_read_the_same_however_it_is_cut(
    pieces: list[str], cuts: list[int], is_whole: bool
) -> None:
    text, ended_by = tags("".join(pieces)), "" if is_whole else None
    places = [0, *sorted(min(at, len(text)) for at in cuts), len(text)]

    def events(parts: list[str]) -> list[Event]:
        reader = parser()
        return joined([*(one for part in parts for one in reader.push(part)), *reader.finish(ended_by)])

    found = events([text])
    assert events([text[a:b] for a, b in pairwise(places)]) == found
    Answer.of(found)  # whose calls are valid JSON
    ends = sum(isinstance(event, CallEnd | CallBroken) for event in found)
    assert ends == sum(isinstance(event, CallStart) for event in found)
    shown = [getattr(event, "text", getattr(event, "rest", " ")) for event in found]
    assert "".join(shown).count("text") == text.count("text")


@pytest.mark.parametrize("unit", ["x", " ", "<", "<|open|>", "<|open|>call ", "<|close|>", "<|sep|>", CALL])
@pytest.mark.slow
def test_time_is_linear(unit: str) -> None:
    value = '[tools][call tool="f"][argument key="a"]'
    for beginning in ("", "[tools]", '[tools][call tool="f"]', value, '[tools][call tool="f"]{"a": "'):
        assert_linear(lambda: parser(""), tags(beginning), tags(unit))


@pytest.mark.slow
def test_long_white_space_between_sections_takes_linear_time() -> None:
    """Quadratic time shows only at such lengths."""

    def seconds(count: int) -> float:
        start = time.thread_time()
        assert parser("").push(" " * count) == []
        return time.thread_time() - start

    assert any(seconds(800_000) < 20 * seconds(100_000) for _ in range(2))
