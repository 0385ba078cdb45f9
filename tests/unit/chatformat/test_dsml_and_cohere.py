"""Calls of DeepSeek-V3.2 and V4 and of Cohere's models in the forms that users of other servers have reported."""

from __future__ import annotations

from typing import Any

import pytest

from moeserve.chatformat.formats import TOOL_FORMATS, tool_format
from moeserve.chatformat.output import OutputParser, joined
from moeserve.chatformat.reasoning import COHERE, ReasoningParser, ReasoningTags, reasoning_tags
from moeserve.httpserver.generation.chat.template_input import with_ids
from moeserve.tokenizer.chat_template import ChatTemplate
from tests.support.chats.chat_events import Answer
from tests.support.chats.deepseek_templates import DEEPSEEK_V4
from tests.support.chats.family_templates import COHERE as COHERE_TEMPLATE

SCHEMAS: dict[str, Any] = {
    "f": {
        "properties": {
            "a": {"type": "string"},
            "b": {"type": "string"},
            "n": {"type": "integer"},
            "on": {"type": "boolean"},
            "tags": {"type": "array"},
            "word": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        }
    }
}
THINK = reasoning_tags("</think>")


def read(
    name: str,
    text: str,
    *,
    ended_by: str | None = "",
    thinks: ReasoningTags | None = None,
    schemas: dict[str, Any] = SCHEMAS,
) -> Answer:
    """Reads the text whole and character by character. thinks: the tags of reasoning that the prompt has opened."""

    def answer(*pieces: str) -> Answer:
        reasoning = None if thinks is None else ReasoningParser(True, thinks)
        parser = OutputParser(reasoning, TOOL_FORMATS[name].parser(schemas), ("f", "g"))
        events = [event for piece in pieces for event in parser.push(piece)]
        return Answer.of(joined([*events, *parser.finish(ended_by)]))

    whole = answer(text)
    assert answer(*text) == whole
    return whole


def dsml(text: str) -> str:
    """Returns the text with `|` for the mark `｜DSML｜`."""
    return text.replace("|", "｜DSML｜")


A = '<|parameter name="a" string="true">x</|parameter>\n'
B = '<|parameter name="b" string="true">y</|parameter>\n'
CALL = f'<|invoke name="f">\n{A}{B}</|invoke>'
AX, BOTH = ("f", {"a": "x"}), ("f", {"a": "x", "b": "y"})


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"<|function_calls>\n{CALL}\n</|function_calls>", [BOTH]),  # V3.2's name from V4, and the reverse
        (f"<|tool_calls>\n{CALL}\n</|tool_calls>", [BOTH]),
        (f"<|toolcalls>\n{CALL}\n</|tool_calls>", [BOTH]),  # vllm #51914
        (f"<|tool_use>\n{CALL}\n</|tool_use>", [BOTH]),  # AgentFlocks/flocks #687
        (f"{CALL}\n</|tool_calls>", [BOTH]),  # vllm #48931: the opening tag is missing
        (CALL, [BOTH]),
        (f"{CALL}\n</|invoke>\n</|parameter>\n</|tool_calls>", [BOTH]),  # vllm #56184: stray closing tags
        (f"<|tool_calls>\n{CALL}\n{CALL}", [BOTH, BOTH]),  # sglang #40236: the block is not closed
        (CALL.replace("</|parameter>\n<", "\n<"), [BOTH]),  # vllm #53227, #54838
        (CALL.replace("\n</|invoke>", "</|invoke>").replace("y</|parameter>", "y\n"), [BOTH]),
        (f'<|tool_calls>\n<|invoke name="f">\n{A}{B}', [BOTH]),
        (f'<|tool_calls>\n<|invoke name="f">\n{A}<|invoke name="f">\n{A}</|invoke></|tool_calls>', [AX, AX]),
        (CALL.replace("\n", ""), [BOTH]),
        (CALL.replace("</|parameter>", "</parameter>"), [BOTH]),
        # sglang #39435, V4.1-Flash: neither mark nor type
        ('<|invoke name="f">\n<parameter name="on">true</|parameter>\n</|invoke>', [("f", {"on": True})]),
        (
            f'<|invoke name="f">\n{A}<parameter name="n">3</|parameter>\n</|invoke>',
            [("f", {"a": "x", "n": 3})],
        ),
        ('<|invoke name="f">\n{"a": "x", "b": "y"}\n</|invoke>', [BOTH]),  # JSON in the place of parameters
        ('<|tool_calls><|invoke name="f">{"a": "x", "b": "y"</|invoke></|tool_calls>', [BOTH]),
        ('<|tool_calls>{"name": "f", "arguments": {"a": "x", "b": "y"}}</|tool_calls>', [BOTH]),
        ('<|tool_calls><|invoke name="g"/></|tool_calls>', [("g", {})]),
        ('<|tool_calls><|invoke name="g" /><|invoke name="f">{}</|invoke>', [("g", {}), ("f", {})]),
        ('<|tool_calls><|invoke name="g"></|invoke></|tool_calls>', [("g", {})]),
        ("<|invoke name='f'><|parameter string='true' name='a'>x</|parameter></|invoke>", [AX]),
        ("<|invoke name=f><|parameter name=a string=true>x</|parameter></|invoke>", [AX]),
    ],
)
@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4"])
def test_dsml_as_models_write_it(name: str, text: str, calls: list[tuple[str, Any]]) -> None:
    assert read(name, dsml(text)) == Answer("", "", calls)
    assert read(name, dsml(f"Let me see.\n\n{text}")) == Answer("Let me see.", "", calls)
    assert read(name, dsml(f"Hm.\n\n{text}"), thinks=THINK) == Answer("", "Hm.", calls)
    assert read(name, dsml(f"Hm.\n</think>\n\n{text}"), thinks=THINK) == Answer("", "Hm.", calls)


@pytest.mark.parametrize(
    "text",
    [
        "<|tool_calls>\n</|tool_calls>",
        '<|tool_calls>\n<|invoke name="record_item {\ncategory: Dexes',  # vllm #54686
        "I write <|invoke and a name.",
        'An <|invoke name="f"> tag, then text.',
        '<|invoke name="">\n</|invoke>',
        '<|invoke id="1">\n</|invoke>',
        '<|invoke name="f">\n<|parameter id="a">x</|parameter>\n</|invoke>',
        '<|invoke name="f">\n<|parameter name="a"/>\n</|invoke>',
        "</|parameter>",
        '<invoke name="f"><parameter name="a" string="true">x</parameter></invoke>',  # no mark at all
        "<|toolcall>Read\n\n```json\n{}\n```",  # vllm-ascend #13794
    ],
)
def test_other_dsml_is_text(text: str) -> None:
    assert read("deepseek_v4", dsml(text)) == Answer(dsml(text))


# Arguments of another format, such as in a file about tool calls.
UNMARKED = '<parameter name="b">1</parameter>\n<parameter name="n">2</parameter>\n'


@pytest.mark.parametrize(
    ("key", "is_string", "text", "value"),
    [
        ("a", "true", " 1\n", " 1\n"),
        ("a", "false", '"x"', "x"),
        ("a", "false", "x", "x"),
        ("a", "false", "12", "12"),  # the schema says that it is a string
        ("n", "false", "12", 12),
        ("n", "true", "12", 12),
        ("n", "false", "twelve", "twelve"),
        ("tags", "false", '["a", {"b": null}]', ["a", {"b": None}]),
        ("word", "true", "null", "null"),
        ("word", "false", "null", None),
        ("word", "false", '"a\\n\\ud83d\\ude00"', "a\n😀"),
        ("other", "true", "12", "12"),  # of which the schema says nothing
        ("other", "false", "12", 12),
        ("other", "false", '"12"', "12"),
        ("other", "false", '{"x": [1, "y"]}', {"x": [1, "y"]}),
        ("other", "false", "nothing", "nothing"),
        ("other", "maybe", "12", "12"),
        ("a", "true", "</parameter>\n", "</parameter>\n"),
        ("a", "true", UNMARKED, UNMARKED),
    ],
)  # fmt: skip
def test_the_schema_and_the_tag_say_what_a_value_is(key: str, is_string: str, text: str, value: Any) -> None:
    one = f'<|invoke name="f">\n<|parameter name="{key}" string="{is_string}">{text}</|parameter>\n</|invoke>'
    assert read("deepseek_v4", dsml(one)).calls == [("f", {key: value})]


def test_dsml_that_is_cut_off_closes_nothing() -> None:
    for text in (
        f'<|invoke name="f">\n{A}',
        '<|invoke name="f">\n{"a": "x"',
        f'<|invoke name="f">\n{A}</|inv',
    ):
        assert read("deepseek_v4", dsml(text), ended_by=None).calls == []


def test_templates_that_write_tags_in_parts_are_known() -> None:
    concatenated = "{%- set dsml = '｜DSML｜' -%}{{ '<' + dsml + 'BLOCK>' }}</think>"
    assert [
        tool_format(concatenated.replace("BLOCK", block)) for block in ("function_calls", "tool_calls")
    ] == [
        TOOL_FORMATS["deepseek_v32"],
        TOOL_FORMATS["deepseek_v4"],
    ]
    assert tool_format(DEEPSEEK_V4) is TOOL_FORMATS["deepseek_v4"]


# ---- Cohere


ACTION = '{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": "x"}}'


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"<|START_ACTION|>[\n    {ACTION}\n]<|END_ACTION|>", [AX]),
        (f"<|START_ACTION|>[\n    {ACTION},\n    {ACTION}\n]<|END_ACTION|>", [AX, AX]),
        (f"<|START_ACTION|>[{ACTION}]", [AX]),
        (f"<|START_ACTION|>[{ACTION}", [AX]),
        (f"<|START_ACTION|>[{ACTION[:-2]}", [AX]),
        (f"<|START_ACTION|>{ACTION}<|END_ACTION|>", [AX]),  # no list
        (f"<|START_ACTION|>\n{ACTION}\n{ACTION}\n<|END_ACTION|>", [AX]),
        (f"<|START_ACTION|>[{ACTION}]<|END_ACTION|><|START_ACTION|>[{ACTION}]<|END_ACTION|>", [AX, AX]),
        ('<|START_ACTION|>[{"tool_name": "f", "parameters": {"a": "x"}}]<|END_ACTION|>', [AX]),
        (
            '<|START_ACTION|>[{"tool_call_id": 0, "tool_name": "f", "parameters": {"a": "x"}}]<|END_ACTION|>',
            [AX],
        ),
        ('<|START_ACTION|>[{"parameters": {"a": "x"}, "tool_name": "f"}]<|END_ACTION|>', [AX]),
        ('<|START_ACTION|>[{"name": "f", "arguments": {"a": "x"}}]<|END_ACTION|>', [AX]),
        ('<|START_ACTION|>[{"tool_name": "f", "parameters": "{\\"a\\": \\"x\\"}"}]<|END_ACTION|>', [AX]),
        ("<|START_ACTION|>[{'tool_name': 'f', 'parameters': {'a': 'x',},}]<|END_ACTION|>", [AX]),
    ],
)
def test_coheres_calls_as_models_write_them(text: str, calls: list[tuple[str, Any]]) -> None:
    found = read("cohere", text)
    assert found.calls == calls
    reasoned = read("cohere", f"I need f.<|END_THINKING|>{text}", thinks=COHERE)
    assert (reasoned.reasoning, reasoned.calls) == ("I need f.", calls)
    unclosed = read("cohere", f"I need f.{text}", thinks=COHERE)
    assert (unclosed.reasoning, unclosed.calls) == ("I need f.", calls)


@pytest.mark.parametrize(
    "text",
    [
        "<|START_ACTION|>[]<|END_ACTION|>",
        "<|START_ACTION|>[\n    <write_to_file>\n<path>a.py</path>",  # seen of North
        '<|START_ACTION|>[{"tool_name": 1, "parameters": {}}]<|END_ACTION|>',
        '<|START_ACTION|>[{"tool_name": "f", "parameters": []}]<|END_ACTION|>',
        "I write <|START_ACTION and text",
        'Action: ```json\n[{"tool_name": "f", "parameters": {}}]\n```',
    ],
)
def test_other_actions_are_text(text: str) -> None:
    assert read("cohere", text) == Answer(text)


def test_coheres_ids_count_the_calls_of_a_conversation() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "x"}}}
    calls = [call | {"id": "call_a"}, call | {"id": "call_b"}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "two", "tool_call_id": "call_b"},
        {"role": "tool", "content": "one", "tool_call_id": "call_a"},
        {"role": "assistant", "content": "", "tool_calls": [call | {"id": "call_c"}]},
        {"role": "tool", "content": "three"},
    ]
    call_id = TOOL_FORMATS["cohere"].call_id
    assert call_id is not None
    prompt = ChatTemplate(COHERE_TEMPLATE, {}).render(with_ids(messages, call_id))
    ids = [part.partition('"')[0] for part in prompt.split('"tool_call_id": "')[1:]]
    assert ids == ["0", "1", "1", "0", "2", "2"]
    assert "<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[" in prompt
