"""Calls as models write them beside what their format says: from public reports, for each format. Whole, character by
character, and cut in two, the outcome is the same. (test_families.py cuts in two everywhere.)"""

from __future__ import annotations

from typing import Final

import pytest

from moeserve.chatformat.events import Reasoning
from moeserve.chatformat.formats import TOOL_FORMATS
from tests.support.chats.chat_events import Answer
from tests.support.chats.chat_families import tags_of
from tests.support.chats.family_templates import TEMPLATES
from tests.support.chats.written_answers import NAMES, call, parser_of, read
from tests.support.nightly import nightly_after

# ---- closing tags and brackets that are missing

CODER: Final = "<tool_call>\n<function=f>\n<parameter=a>\nx\n"
GLM: Final = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x"
MINIMAX: Final = '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">x'
DEEPSEEK: Final = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "x"'
DEEPSEEK_V3: Final = DEEPSEEK.replace("f<｜tool▁sep｜>", "function<｜tool▁sep｜>f\n```json\n")
KIMI: Final = (
    '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": "x"'
)
SEED: Final = "<seed:tool_call>\n<function=f>\n<parameter=a>x"
PHI4: Final = '<|tool_call|>[{"name": "f", "arguments": {"a": "x"'
HERMES: Final = '<tool_call>\n{"name": "f", "arguments": {"a": "x"'
LFM2: Final = '<|tool_call_start|>[f(a="x"'
GEMMA: Final = '<|tool_call>call:f{a:<|"|>x<|"|>'
HARMONY: Final = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "x"'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", CODER + "<parameter=b>\ny\n</parameter>\n</function>\n</tool_call>"),
        ("qwen3_coder", CODER + "</parameter>\n<parameter=b>\ny\n</function>\n</tool_call>"),
        ("qwen3_coder", CODER + "</parameter>\n<parameter=b>\ny\n</parameter>\n</tool_call>"),
        ("qwen3_coder", CODER + "<parameter=b>\ny\n</tool_call>"),
        ("qwen3_coder", CODER + "<parameter=b>\ny\n</function>"),
        ("qwen3_coder", CODER + "</parameter>\n<parameter=b>\ny\n</parameter>\n"),  # and the answer ends
        ("qwen3_coder", CODER + "</parameter>\n<parameter=b>y</parameter>"),
        ("qwen3_coder", CODER + "</parameter1>\n<parameter=b>\ny\n</parameter\n</function>\n</tool_call>"),
        ("qwen3_coder", CODER + "</a>\n<parameter=b>\ny\n</parameter/>\n</function>\n</tool_call>"),
        ("qwen3_coder", CODER + "</parameter>\n<parameter=b>\ny\n</parameter_function>\n</tool_call>"),
        (
            "qwen3_coder",
            CODER.replace("=f>", "=f") + "<parameter=b>\ny\n</parameter>\n</function>\n</tool_call>",
        ),
        ("qwen3_coder", CODER.removeprefix("<tool_call>\n") + "<parameter=b>\ny\n</function>\n</tool_call>"),
        ("seed_oss", SEED + "\n<parameter=b>y</parameter>\n</function>\n</seed:tool_call>"),
        ("seed_oss", SEED + "</parameter>\n<parameter=b>y\n</function>\n</seed:tool_call>"),
        ("seed_oss", SEED + "</parameter>\n<parameter=b>y</parameter>\n</seed:tool_call>"),
        ("seed_oss", SEED + "</parameter>\n<parameter=b>y</seed:tool_call>"),
        ("seed_oss", SEED + "</parameter>\n<parameter=b>y</parameter>\n</function>\n</tool_call>"),
        ("seed_oss", SEED + "</parameter>\n<parameter=b>y</parameter>\n</function>\n"),
        ("seed_oss", SEED.partition("\n")[2] + "</parameter>\n<parameter=b>y</parameter>\n</function>"),
        ("phi4_mini", PHI4 + ', "b": "y"}}<|/tool_call|>'),
        ("phi4_mini", PHI4 + ', "b": "y"}]<|/tool_call|>'),
        ("phi4_mini", PHI4 + ', "b": "y"<|/tool_call|>'),
        ("phi4_mini", PHI4 + ', "b": "y"}}]'),
        ("phi4_mini", PHI4 + ', "b": "y"}}'),
        ("phi4_mini", PHI4.replace("[", "") + ', "b": "y"}}<|/tool_call|>'),
        ("glm45", GLM + "\n<arg_key>b</arg_key>\n<arg_value>y</arg_value>\n</tool_call>"),
        ("glm45", GLM + "<arg_key>b</arg_key><arg_value>y</tool_call>"),
        ("glm45", GLM + "</arg_value>\n<arg_key>b</arg_key>\n<arg_value>y</arg_value>\n"),
        ("glm45", GLM + "</arg_value>\n<arg_key>b\n<arg_value>y</arg_value>\n</tool_call>"),
        ("glm45", GLM + "</arg_value>\n<arg_key>b<arg_value>y</arg_value></tool_call>"),
        ("glm45", GLM + "</arg_value><arg_key>b</arg_key>y</arg_value></tool_call>"),  # no opening tag
        ("minimax_m2", MINIMAX + '\n<parameter name="b">y</parameter>\n</invoke>\n</minimax:tool_call>'),
        ("minimax_m2", MINIMAX + '</parameter>\n<parameter name="b">y\n</invoke>\n</minimax:tool_call>'),
        ("minimax_m2", MINIMAX + '</parameter>\n<parameter name="b">y</parameter>\n</minimax:tool_call>'),
        ("minimax_m2", MINIMAX + '</parameter>\n<parameter name="b">y</parameter>\n'),
        ("minimax_m2", MINIMAX + '<parameter name="b">y</minimax:tool_call>'),
        ("hermes", HERMES + ', "b": "y"}\n</tool_call>'),
        ("hermes", HERMES + ', "b": "y"\n</tool_call>'),
        ("hermes", HERMES + ', "b": "y"}}}\n</tool_call>'),
        ("hermes", HERMES + ', "b": "y"}'),
        ("hermes", HERMES.replace("arguments", "parameters") + ', "b": "y"'),
        ("deepseek_v31", DEEPSEEK + ', "b": "y"<｜tool▁call▁end｜><｜tool▁calls▁end｜>'),
        ("deepseek_v31", DEEPSEEK + ', "b": "y"<｜tool▁calls▁end｜>'),
        ("deepseek_v31", DEEPSEEK + ', "b": "y"'),
        ("deepseek_v3", DEEPSEEK_V3 + ', "b": "y"\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'),
        ("deepseek_v3", DEEPSEEK_V3 + ', "b": "y"}<｜tool▁calls▁end｜>'),
        ("kimi_k2", KIMI + ', "b": "y"<|tool_call_end|><|tool_calls_section_end|>'),
        ("kimi_k2", KIMI + ', "b": "y"}<|tool_calls_section_end|>'),
        ("kimi_k2", KIMI + ', "b": "y"}'),
        ("kimi_k2", KIMI.replace("calls", "call") + ', "b": "y"}<|tool_call_end|><|tool_call_section_end|>'),
        ("kimi_k2", KIMI.partition("|>")[2] + ', "b": "y"}<|tool_call_end|>'),
        ("kimi_k2", KIMI.replace("functions.f:0", " f ") + ', "b": "y"}<|tool_call_end|>'),
        ("gemma4", GEMMA + ',b:<|"|>y<|"|><tool_call|>'),
        ("gemma4", GEMMA + ',b:<|"|>y<|"|>'),
        ("lfm2", LFM2 + ', b="y")<|tool_call_end|>'),
        ("lfm2", LFM2 + ', b="y"<|tool_call_end|>'),
        ("lfm2", LFM2 + ', b="y"'),
        ("harmony", HARMONY + ', "b": "y"<|call|>'),
        ("harmony", HARMONY + ', "b": "y"'),
        ("harmony", HARMONY + ', "b": "y"<|end|>'),
    ],
)
def test_what_the_next_tag_or_the_answers_end_implies_is_closed(name: str, text: str) -> None:
    assert read(name, text) == Answer("", "", [("f", {"a": "x", "b": "y"})])


@pytest.mark.parametrize("name", [name for name in NAMES if name != "llama"])  # which has no tags
def test_a_next_call_closes_the_one_before(name: str) -> None:
    """What one call lacks does not cost the next one."""
    ends = {
        "qwen3_coder": "</function>\n</tool_call>",
        "glm45": "</tool_call>",
        "minimax_m2": "</invoke>\n",
        "minimax_m3": "]<]minimax[>[</invoke>\n",
        "hermes": "}\n</tool_call>",
        "deepseek_v3": "<｜tool▁call▁end｜>",
        "deepseek_v31": "<｜tool▁call▁end｜>",
        "kimi_k2": "<|tool_call_end|>",
        "gemma4": "<tool_call|>",
        "harmony": "<|call|>",
        "mistral": "}",
        "mistral_json": "}}]",
        "granite": "}}]",
        "phi4_mini": "}]<|/tool_call|>",
        "seed_oss": "</function>\n</seed:tool_call>",
        "hunyuan": "}]</tool_calls>",
        "nemotron": "}]</TOOLCALL>",
        "hy_v3": "</tool_call:opensource>",
        "hy_v3_preview": "</tool_call>",
        "lfm2": ")]",
        "deepseek_v32": "</｜DSML｜invoke>",
        "deepseek_v4": "</｜DSML｜invoke>",
        "cohere": "}]<|END_ACTION|>",
    }
    text = call(name, {"a": "x"})
    first = text[: text.index(ends[name])].rstrip()
    second = text
    if name == "minimax_m2":
        second = text.partition("<minimax:tool_call>")[2].lstrip()
    elif name == "minimax_m3":
        second = text.partition("<tool_call>")[2].lstrip()
    elif "DSML" in text:
        second = text[text.index("<｜DSML｜invoke") :]
    elif "tool▁" in text or "section" in text:
        second = text[text.index("tool▁call▁begin" if "▁" in text else "tool_call_begin") - 2 :]
    elif name == "harmony":
        second = "<|start|>assistant" + text
    assert read(name, f"{first}\n{second}").calls == [("f", {"a": "x"})] * 2


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_was_cut_off_closes_nothing(name: str) -> None:
    """Its arguments may lack what matters."""
    text = call(name, {"a": "one two three"})
    cut = text[: text.index(" three")]
    assert read(name, cut, ended_by=None).calls == []
    assert "two" in read(name, cut, ended_by=None).text


def test_a_call_without_arguments_needs_no_closing_tag() -> None:
    now = Answer("", "", [("now", {})])
    assert read("qwen3_coder", "<tool_call>\n<function=now>\n</tool_call>") == now
    assert read("glm45", "<tool_call>now</arg_value></tool_call>") == now
    assert read("glm45", "<tool_call>now", ended_by="</tool_call>") == now
    assert read("hermes", '<tool_call>{"name": "now", "arguments": {\n</tool_call>') == now


# ---- tags of the format within a value

FILES: Final = (
    "A block ends with </parameter> here.",
    "A tool call block ends with </tool_call> on its own.",
    "</arg_value> and </invoke>, </function>\n</tool_call> too: </minimax:tool_call>.",
    '</parameter>\n\nand <parameter=x>, <parameter name="x"> or <arg_key>x</arg_key> in a line',
    'return "</parameter>"\n',
    "ends with </parameter>",
    "ends with </arg_value>\n",
    "ends with </function>",
    "<tool_call>\n<function=g>\n<parameter=q>\n1\n</parameter>\n</function>\n</tool_call>\nis a call",
    "<tool_call>g\n<arg_key>q</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\nis a call",
    '<minimax:tool_call>\n<invoke name="g">\n<parameter name="q">1</parameter>\n</invoke>\n</minimax:tool_call>\nis',
    '<tool_call>\n{"name": "g", "arguments": {"q": "1"}}\n</tool_call>',
    'call:g{q:1}<tool_call|> and a quote " and \\ more',
    "<|call|> <|end|> <｜tool▁call▁end｜> <|tool_call_end|> ```\n</think>",
    "<b>tags</b> </param> < / >",
    '<｜DSML｜invoke name="g">\n<｜DSML｜parameter name="q" string="true">1</｜DSML｜parameter>\n</｜DSML｜invoke>\nis',
    "</｜DSML｜parameter> or </｜DSML｜tool_calls>.",
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", nightly_after(4, FILES))
def test_a_value_may_hold_the_tags_of_its_format(name: str, text: str) -> None:
    if name == "hy_v3_preview" and text.startswith("<tool_call>g\n<arg_key>"):
        pytest.xfail("a call of GLM's form has its closing tags, and another beginning")
    if name == "phi4_mini" and "<|end|>" in text:
        pytest.skip("the text of the call is cut out of a prompt at this token")
    for arguments in ({"a": text}, {"a": text, "b": "y"}, {"b": "y", "a": text}):
        assert read(name, call(name, arguments)) == Answer("", "", [("f", arguments)])


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2"])
def test_a_value_with_tags_comes_as_it_is_written(name: str) -> None:
    """Held back is no more than what may be the value's end."""
    text = call(name, {"a": "one </parameter> two </arg_value> three " + "x" * 50})
    parser = parser_of(name)
    shown = [bool(parser.push(char)) for char in text]
    longest = max(len(run) for run in "".join("x" if one else " " for one in shown[45:]).split("x"))
    assert longest <= 40


# ---- calls within a thought

REASONING: Final = "I should look.\nMaybe with f."


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("is_open", [True, False])
def test_a_call_ends_a_thought_that_is_not_closed(name: str, is_open: bool) -> None:
    opening = "" if is_open else tags_of(name).open + "\n"
    one = call(name, {"a": "x"})
    expected = Answer("", REASONING, [("f", {"a": "x"})])
    assert read(name, f"{opening}{REASONING}\n{one}", is_open=is_open) == expected
    assert read(name, f"{opening}{REASONING}\n{one}\n", is_open=is_open) == expected
    twice = read(name, f"{opening}{REASONING}\n{one}\nAnd:\n{one}", is_open=is_open)
    assert twice.calls == [("f", {"a": "x"})] * 2
    assert (twice.reasoning, twice.text.strip()) == (REASONING, "And:")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_closing_tag_behind_the_call_is_no_text(name: str) -> None:
    tags = tags_of(name)
    one = call(name, {"a": "x"})
    expected = Answer("", REASONING, [("f", {"a": "x"})])
    assert read(name, f"{REASONING}\n{one}\n{tags.close}", is_open=True) == expected
    expected.text = "Let me see."
    assert read(name, f"{REASONING}\n{one}{tags.ending}Let me see.", is_open=True) == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_draft_of_a_call_is_part_of_the_thought(name: str) -> None:
    ending = tags_of(name).ending
    draft, real = call(name, {"a": "draft"}), call(name, {"a": "x"})
    called = read(name, f"I could write {draft} or not.{ending}{real}", is_open=True)
    assert called.calls == [("f", {"a": "x"})]
    assert called.reasoning == f"I could write {draft} or not."
    assert read(name, f"{draft}{ending}{real}", is_open=True).calls == [("f", {"a": "x"})]
    answered = read(name, f"It is {draft}, but no.{ending}Hi", is_open=True)
    assert answered == Answer("Hi", f"It is {draft}, but no.", [])
    long = "but no. " * 300
    assert read(name, f"It is {draft} {long}", is_open=True).calls == []


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_mention_of_a_tag_is_part_of_the_thought(name: str) -> None:
    tags, ending = TOOL_FORMATS[name].tags, tags_of(name).ending
    for mention in (
        f"I write {tags.open} and the name.",
        f"{tags.open}{tags.close}",
        f"{tags.open}f and then {tags.close}",
        f"A {tags.bare or tags.open} tag, < and <b> too",
        call(name, {"a": "the end"}).partition(" end")[0],
        call(name, {"a": "x"})[: len(call(name, {"a": "x"})) // 2] + " and so on",
    ):
        assert read(name, f"{mention}{ending}Hi", is_open=True) == Answer("Hi", mention.strip("\n"))
    other = call(name, {"a": "x"})
    assert read(name, f"So: {other}", is_open=True, offered=("g",)) == Answer("", f"So: {other}")


def test_a_thought_comes_as_it_is_written() -> None:
    parser = parser_of("hermes", is_open=True)
    seen = [event for char in "So < I <think about <tool_call> it." for event in parser.push(char)]
    assert "".join(event.text for event in seen if isinstance(event, Reasoning)).startswith(
        "So < I <think about <tool_call> it"
    )


def test_gpt_oss_calls_within_its_analysis() -> None:
    one = 'commentary to=functions.f <|constrain|>json<|message|>{"a": "x"}'
    for text in (
        f"<|channel|>analysis<|message|>{REASONING}<|channel|>{one}",
        f"<|channel|>analysis<|message|>{REASONING}<|start|>assistant<|channel|>{one}",
        f"<|channel|>analysis<|message|>{REASONING}<|end|><|start|>assistant to=functions.f<|channel|>analysis code"
        + one[one.index("<|message|>") :],
    ):
        assert read("harmony", text) == Answer("", REASONING, [("f", {"a": "x"})])
