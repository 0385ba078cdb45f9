"""The formats of the published families: calls as their templates render them, cut at every character; what is
malformed stays text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.chatformat.events import CallArguments, CallBroken, CallEnd, CallStart, Reasoning, Text
from moeserve.chatformat.formats import TOOL_FORMATS, has_sections, is_harmony, is_solar_open, tool_format
from moeserve.chatformat.harmony import HarmonyParser
from moeserve.chatformat.output import OutputParser, joined
from moeserve.config import ServerConfig
from tests.support.chats.chat_events import Answer, events_of
from tests.support.chats.chat_families import REASONING, answer_in, make_for
from tests.support.chats.family_templates import HARMONY, TEMPLATES, kept
from tests.support.chats.kimi_k3_template import KIMI_K3
from tests.support.chats.solar_template import SOLAR
from tests.support.nightly import nightly_after

CALLS: list[tuple[str, Any]] = [
    (
        "search",
        {
            "query": 'two\n "lines", {braces} and <tags> \\ é\u2028',
            "count": 7,
            "exact": False,
            "filters": {"a": [None, {"b": "}"}]},
            "tags": ["x", 1],
            "note": None,
        },
    ),
    ("no.arguments-at_all", {}),
    ("search", {"query": ""}),
]
NAMES = [*TEMPLATES, "harmony", "kimi_k3", "solar_open"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_what_a_template_renders_comes_back_however_it_is_cut(name: str, step: int) -> None:
    """Character by character; and in two at every `step` characters."""
    text = answer_in(name, REASONING, "Let me see.", CALLS)
    make = make_for(name)
    events = events_of(make, [text])
    assert Answer.of(events) == Answer("Let me see.", REASONING, kept(name, CALLS))
    assert events_of(make, list(text)) == events
    for at in range(0, len(text), step):
        assert events_of(make, [text[:at], text[at:]]) == events


@pytest.mark.parametrize("name", nightly_after(5, NAMES))
@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_an_answer_that_ends_anywhere_loses_nothing(name: str, step: int) -> None:
    """Its calls are whole ones, and the rest of the last one is text. The answer ends at every `step` characters."""
    text = answer_in(name, "", "Let me see.", CALLS[:2])
    for end in range(0, len(text), step):
        answer = Answer.of(events_of(make_for(name), [text[:end]]))
        assert answer.calls == kept(name, CALLS)[: len(answer.calls)]
        if not answer.calls and "search" in text[:end]:
            assert text[:end].endswith(answer.text.removeprefix("Let me see.").lstrip())
            assert "search" in answer.text or name == "harmony"


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_without_calls_is_what_it_says(name: str) -> None:
    text = "  Hello,\n <b>world</b> ```json\n{}\n``` <| to=x \n"
    assert events_of(make_for(name), list(text)) == [Text(text)]


def test_the_table_knows_each_family_by_its_template() -> None:
    assert {name: tool_format(template) for name, template in TEMPLATES.items()} == dict(TOOL_FORMATS)
    assert is_harmony(HARMONY)
    assert has_sections(KIMI_K3)
    assert not any(map(is_harmony, (*TEMPLATES.values(), KIMI_K3)))
    assert not any(map(has_sections, (*TEMPLATES.values(), HARMONY)))
    assert is_solar_open(SOLAR)
    assert not any(map(is_solar_open, (*TEMPLATES.values(), HARMONY, KIMI_K3)))
    assert not any(other(SOLAR) for other in (is_harmony, has_sections, tool_format))
    assert tool_format(KIMI_K3) is None
    (flag,) = (one for one in ServerConfig.__dataclass_fields__.values() if one.name == "tool_call_parser")
    assert set(flag.metadata["choices"]) == {
        "auto",
        "none",
        "harmony",
        "kimi_k3",
        "solar_open",
        *TOOL_FORMATS,
    }


@pytest.mark.parametrize("name", TEMPLATES)
def test_guided_calls_are_read_as_their_form_is_written(name: str) -> None:
    guided = TOOL_FORMATS[name].guided
    tool = "f:0" if guided.numbered else "f"
    body = guided.before_name + tool + guided.before_arguments + '{"a": "</"}' + guided.behind
    call = guided.open + body + guided.close
    text = guided.open + body + guided.separator + body + guided.close
    if not guided.is_block:
        text = call + guided.separator + call
    parser = OutputParser(None, TOOL_FORMATS[name].parser({}, "json"))
    assert Answer.of(parser.push(text) + parser.finish()) == Answer("", "", [("f", {"a": "</"})] * 2)


MARK = "]<]minimax[>["
# Of a tool whose schema says nothing of what is within an argument.
M3_CALL = (
    '|<tool_call>|<invoke name="f">|<a>|<item>1|</item>|<item>|<b>x ]<|</b>|</item>|</a>|<c>2|</c>'
    "|<d>|<e>true|</e>|</d>|</invoke>|</tool_call>"
)
M3_ARGUMENTS = [("f", {"a": [1, {"b": "x ]<"}], "c": "2", "d": {"e": True}})]
BLOCK = "<｜tool▁calls▁begin｜>"
ONE = "<｜tool▁call▁begin｜>"


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [
        (
            "glm45",
            "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
            [("f", {"a": "1"})],
        ),
        ("glm45", "<tool_call>\nf\n</tool_call>\n<tool_call>g</tool_call>", [("f", {}), ("g", {})]),
        ("minimax_m2", '<minimax:tool_call><invoke name="f"></invoke>', [("f", {})]),
        ("minimax_m3", M3_CALL.replace("|", MARK), M3_ARGUMENTS),
        ("minimax_m3", M3_CALL.replace("|", MARK).replace("><", ">\n <"), M3_ARGUMENTS),
        ("minimax_m3", '|<tool_call>{"name": "f", "arguments": {}}'.replace("|", MARK), [("f", {})]),
        (
            "deepseek_v3",
            f"{ONE}f<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>",
            [("f", {})],
        ),  # without the block's tag
        (
            "deepseek_v31",
            f"{BLOCK}{ONE}function<｜tool▁sep｜>f\n```json\n{{}}\n```",
            [("f", {})],
        ),  # V3's form
        ("deepseek_v31", f"{BLOCK}{ONE}f<｜tool▁sep｜>{{}}", [("f", {})]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"a": 1}', [("f", {"a": 1})]),
        ("mistral", '[TOOL_CALLS]f{"a": 1}', [("f", {"a": 1})]),
        ("mistral", "[TOOL_CALLS] f [ARGS] {}[TOOL_CALLS]g[ARGS]{}", [("f", {}), ("g", {})]),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}]', [("f", {})]),
        ("mistral_json", '[TOOL_CALLS]{"name": "f", "arguments": {}}', [("f", {})]),
        ("mistral_json", '[TOOL_CALLS] [{"arguments": {"a": 1}, "name": "f"}]', [("f", {"a": 1})]),
        ("granite", '<|tool_call|> [\n{"name": "f", "arguments": {}}\n]', [("f", {})]),
        ("granite", '<|tool_call|>{"name": "f", "arguments": {}}', [("f", {})]),
        ("hermes", '<tool_call>[{"arguments": {"a": 1}, "name": "f"}]</tool_call>', [("f", {"a": 1})]),
        (
            "hermes",
            '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]</tool_call>',
            [("f", {}), ("g", {})],
        ),
        ("nemotron", '<TOOLCALL>[{"name": "f", "arguments": {}}]</TOOLCALL>', [("f", {})]),
        (
            "nemotron",
            '<TOOLCALL>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]',
            [("f", {}), ("g", {})],
        ),
        ("hunyuan", '\n<tool_calls>\n[{"name": "f", "arguments": {}}]\n</tool_calls>', [("f", {})]),
        ("hy_v3_preview", "<tool_calls><tool_call>f<tool_sep></tool_call></tool_calls>", [("f", {})]),
        (
            "hy_v3",
            "<tool_calls:opensource>\n<tool_call:opensource>f<tool_sep:opensource>\n<arg_key:opensource>a</arg_key:opensource>"
            "<arg_value:opensource>1</arg_value:opensource></tool_call:opensource></tool_calls:opensource>",
            [("f", {"a": "1"})],
        ),
        ("llama", '{"name": "f", "parameters": {"a": "1"}}', [("f", {"a": "1"})]),
        ("llama", '<|python_tag|>{"name": "f", "parameters": {}}', [("f", {})]),
        ("llama", '{"name":"f","arguments":{}};{"name":"g","parameters":{}}', [("f", {}), ("g", {})]),
    ],
)
def test_variants_that_models_write(name: str, text: str, answer: list[tuple[str, Any]]) -> None:
    assert Answer.of(events_of(make_for(name), list(text))) == Answer("", "", answer)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm45", "<tool_call>"),
        ("glm45", "<tool_call>is a tag</tool_call>"),
        ("glm45", "<tool_call>f\nand text"),
        ("glm45", "<tool_call>f<arg_key></arg_key>"),
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\nand text"),
        ("glm45", '<tool_call>{"name": "f", "n": 1}</tool_call>'),
        ("glm45", "<tool_call>" + "f" * 2000),
        ("minimax_m2", "<minimax:tool_call>\nf(1)\n</minimax:tool_call>"),
        ("mistral", "[TOOL_CALLS]f g[ARGS]{}"),
        ("mistral", "[TOOL_CALLS][ARGS]{}"),
        ("mistral", "see [TOOL] and [TOOL_CALLS"),
        ("mistral_json", "[TOOL_CALLS][1, 2]"),
        ("granite", "<|tool_call|>[]"),
        ("hunyuan", "<tool_calls>[]</tool_calls>"),
        ("llama", '{"name": "Ada", "born": 1815}'),
        ("llama", '<|python_tag|>search.call(query="x")'),
        ("llama", '{"names": {}} and {"na'),
        ("minimax_m2", '<minimax:tool_call><invoke name="">'),
        ("minimax_m3", '|<tool_call>|<invoke name="f">text'.replace("|", MARK)),
        ("minimax_m3", '|<tool_call>|<invoke name="">'.replace("|", MARK)),
        ("minimax_m3", f"a [>[ b ]<]mini and {MARK} c ]<]"),
        ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="a">1</param'),
        ("minimax_m2", '<minimax:tool_call><invoke name="' + "f" * 2000),
        ("deepseek_v3", f"{BLOCK} and text"),
        ("deepseek_v3", f"{BLOCK}{ONE}<｜tool▁sep｜>{{}}"),
        ("deepseek_v3", f"{ONE}function<｜tool▁sep｜>f\n```python\n1\n```"),
        ("deepseek_v3", f"{ONE}function<｜tool▁sep｜>f\n```json\n[1]\n```"),
        ("deepseek_v31", f'{ONE}f<｜tool▁sep｜>{{"a": 1,, "b": 2}}'),
        ("deepseek_v31", ONE + "f" * 2000),
    ],
)
def test_a_malformed_call_is_text(name: str, text: str) -> None:
    assert Answer.of(events_of(make_for(name), list(text))) == Answer(text)


def test_who_has_shown_a_tagged_call_that_breaks_shows_the_rest() -> None:
    text = "<tool_call>f\n<arg_key>a<b"
    assert events_of(make_for("glm45"), [f"{text} and more"]) == [
        CallStart(0, "f"),
        CallBroken(0, text.removesuffix("b"), "<arg_key>a<"),
        Text("b and more"),
    ]


ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
NEXT = "<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", Answer()),
        (f"{FINAL}Hi", Answer("Hi")),
        (f"{FINAL}Hi<|return|>", Answer("Hi")),
        (f"{ANALYSIS}Hm{NEXT}{FINAL}Hi<|return|>", Answer("Hi", "Hm")),
        (f"{ANALYSIS}Hm{NEXT}{ANALYSIS}Hm{NEXT}{FINAL}Hi", Answer("Hi", "Hm\n\nHm")),
        (f"{ANALYSIS}Hm<|channel|>final<|message|>Hi", Answer("Hi", "Hm")),  # without an end
        (f"{ANALYSIS}Hm<|start|>assistant{FINAL}Hi", Answer("Hi", "Hm")),
        (f"<|channel|>commentary<|message|>So{NEXT}{FINAL}Hi", Answer("So\n\nHi")),
        (f"{TO_F}{{}}<|call|>", Answer("", "", [("f", {})])),
        (' to=functions.f<|channel|>commentary json<|message|> {"a": 1}', Answer("", "", [("f", {"a": 1})])),
        ("<|channel|>analysis to=f code<|message|>{}<|call|>", Answer("", "", [("f", {})])),
        (f'{TO_F}{{"a": "<|call|>"}}\n<|call|>', Answer("", "", [("f", {"a": "<|call|>"})])),
        (f"{TO_F}{{}}<|call|><|start|>assistant{FINAL}Hi", Answer("Hi", "", [("f", {})])),
        (f"{TO_F}{{}} more", Answer("more", "", [("f", {})])),
        ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", Answer("", "print(1)")),
        (f"{TO_F}[1]<|call|>", Answer("[1]")),
        (f'{TO_F}{{"a": tru<|call|>', Answer(f'{TO_F}{{"a": tru')),
        (f"{TO_F} ", Answer(f"{TO_F} ")),
        (TO_F.removesuffix("<|message|>"), Answer()),  # cut before a call that has no text yet
        ("<|channel|>commentary to=f", Answer()),
        ("<|channel|>final to=5 apples", Answer("to=5 apples")),
        ("<|channel|>final to=5 apples cost {3}", Answer("to=5 apples cost {3}")),
        ('<|channel|>final to=functions.f{"a": 1}', Answer("", "", [("f", {"a": 1})])),
        (f"{FINAL}Hi{NEXT}<|channel|>fi", Answer("Hi")),
        (f"{FINAL}a <| b <|end <|constrain|>", Answer("a <| b <|end <|constrain|>")),
        ("assist", Answer("assist")),
        ("<|channel|>final " + "x" * 3000, Answer("x" * 3000)),
    ],
)
def test_harmony_answers(text: str, answer: Answer) -> None:
    assert Answer.of(events_of(make_for("harmony"), list(text))) == answer


@pytest.mark.parametrize("size", [1, 2000])
@pytest.mark.parametrize(
    ("header", "text"),
    [
        ("final <|constrain|>json", '{"a":1}'),
        ("final <|constrain|>json", '{"a":' + "1" * 2000 + "}"),
        ("final", " The limit is to=5 here"),
        ("commentary to=functions.f", " Hi " + "x" * 2000),
        ("commentary", " to=" + "x" * 2000),
        ("final", " a"),
        ("final", " an assistant is assistant"),
        ("", "assistant, final words"),
        ("final", " " + "x" * (1025 - len("<|channel|>final  ")) + " y"),  # a word ends at the limit
    ],
)
def test_the_text_in_a_header_of_gpt_oss_is_whole(header: str, text: str, size: int) -> None:
    before, after = f"{ANALYSIS}Hm{NEXT}<|channel|>{header}{text}", f"<|start|>assistant{FINAL}Hi"
    for end, rest in (("", ""), ("<|end|>", ""), ("<|end|>" + after, "\n\nHi")):
        answer = f"{before}{end}"
        parser = make_for("harmony")()
        events = [each for at in range(0, len(answer), size) for each in parser.push(answer[at : at + size])]
        assert Answer.of(joined(events + parser.finish(""))) == Answer(text.strip() + rest, "Hm"), end


def test_a_tag_at_the_longest_header_of_gpt_oss_is_no_text() -> None:
    for length in range(980, 1030):
        text = f"<|channel|>final {'x' * length}<|end|><|start|>assistant{FINAL}Hi"
        assert Answer.of(events_of(make_for("harmony"), list(text))) == Answer("x" * length + "\n\nHi")


@pytest.mark.parametrize(
    "tokens",
    [
        ["<|channel|>", "comment", "ary", " to", "="],
        [" to", "="],
        ["<|channel|>", "analysis", " to", "="],
    ],
)
def test_a_call_of_gpt_oss_that_is_cut_before_its_name_shows_nothing(tokens: list[str]) -> None:
    for count in range(len(tokens) + 1):
        text = f"{ANALYSIS}Hm{NEXT}" + "".join(tokens[:count])
        assert Answer.of(events_of(make_for("harmony"), list(text))) == Answer("", "Hm"), text


def test_harmony_goes_on_where_the_prompt_ends() -> None:
    parser = HarmonyParser(f"<|start|>assistant{FINAL}Hello", reads_calls=True)
    assert parser.push(", you<|return|>") + parser.finish() == [Text(", you")]
    thinking = HarmonyParser(f"<|start|>assistant{ANALYSIS}", reads_calls=True)
    assert thinking.is_thinking
    assert thinking.push(f"Hm{NEXT}{FINAL}Hi") == [Reasoning("Hm"), Text("Hi")]
    assert not thinking.is_thinking


def test_harmony_without_calls_and_thoughts_is_text() -> None:
    parser = HarmonyParser("<|start|>assistant", reads_calls=False, separates_reasoning=False)
    assert parser.push(f"{ANALYSIS}Hm{NEXT}{TO_F}{{}}<|call|>") == [Text("Hm\n\n{}")]


def test_arguments_come_as_they_are_written() -> None:
    for name in NAMES:
        text = answer_in(name, "", "", CALLS)
        parser = make_for(name)()
        events = [event for char in text[: text.index("braces")] for event in parser.push(char)]
        assert isinstance(events[0], CallStart)
        assert len([event for event in events if isinstance(event, CallArguments)]) > 10


# ---- texts that are none of what they seem

PARTS = [
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "search", "f\n"),
    *("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', '">', '<parameter name="', "</parameter>"),
    *("</invoke>", BLOCK, ONE, "<｜tool▁sep｜>", "```json\n", "```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "analysis", "final"),
    *(" to=functions.f", "assistant", "commentary", "<think>", "</think>", '{"a": 1}', "{", '"', "<", "<|", "\n", " "),
    *("]<]minimax[>[", "]<", "<tool_call>", "</item>", "<query>", "</query>"),
    *("x", "count", "7", TO_F, FINAL, ANALYSIS),
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PARTS), max_size=14).map("".join)


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 60), max_size=6), st.sampled_from(NAMES))
def test_however_any_text_is_cut_the_events_are_the_same(text: str, cuts: list[int], name: str) -> None:
    pieces, rest = [], text
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    expected = events_of(make_for(name), [text])
    assert events_of(make_for(name), [*pieces, rest]) == expected
    assert events_of(make_for(name), list(text)) == expected
    open_calls = 0
    for event in expected:
        open_calls += isinstance(event, CallStart) - isinstance(event, CallEnd | CallBroken)
        assert open_calls in (0, 1)
    assert open_calls == 0


@settings(max_examples=50, deadline=None)
@given(TEXTS, st.sampled_from([*TEMPLATES]))
def test_text_without_a_whole_call_is_shown_whole(text: str, name: str) -> None:
    events = events_of(lambda: OutputParser(None, TOOL_FORMATS[name].parser({})), [text])
    if not any(isinstance(event, CallEnd) for event in events):
        assert "".join(Answer.of(events).text.split()) == "".join(text.split())


@pytest.mark.parametrize("name", ["glm45", "deepseek_v31", "harmony"])
@pytest.mark.parametrize("unit", ["x", " ", "<", "<tool_call>", ONE, "<|start|>", "<|channel|>x", "to=x "])
@pytest.mark.slow
def test_time_is_linear(name: str, unit: str) -> None:
    from tests.support.measuring.linear_time import assert_linear

    for beginning in (
        "",
        "<tool_call>f<arg_key>",
        ONE,
        f"{ONE}f<｜tool▁sep｜>",
        "<|channel|>",
        TO_F + '{"a": "',
    ):
        assert_linear(make_for(name), beginning, unit)
