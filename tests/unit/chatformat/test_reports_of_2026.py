"""Answers that models wrote in 2026, from public reports about other servers; the names of tools and arguments are the
tests'. Each is read whole, and in pieces of 1, 3 and 7 characters."""

from __future__ import annotations

from typing import Final

import pytest

from moeserve.chatformat.kimi_k3 import KimiK3Parser
from moeserve.chatformat.output import AnswerParser, joined
from tests.support.chats.chat_events import Answer
from tests.support.chats.written_answers import SCHEMAS, parser_of

# (report, format, what the model wrote, whether the prompt began the reasoning, what is meant)
WRITTEN: Final = [
    (
        "ollama/ollama#17742",
        "qwen3_coder",
        "<function=f>\n<parameter=a>\necho LEAK_TEST\n</parameter>\n</function>\n</tool_call>",
        False,
        Answer("", "", [("f", {"a": "echo LEAK_TEST"})]),
    ),
    (
        "vllm-project/vllm#55497 c",
        "qwen3_coder",
        (
            "<tool_call>\n<function=f>\n<parameter=a>\ny\n"
            "</parameter>\n<parameter=b=\n</parameter>\n</function>\n"
            "</tool_call>"
        ),
        False,
        Answer("", "", [("f", {"a": "y", "b": ""})]),
    ),
    (
        "jundot/omlx#1886",
        "gemma4",
        '<|tool_call>call:f(a="x", n=3)<tool_call|>',
        False,
        Answer("", "", [("f", {"a": "x", "n": 3})]),
    ),
    (
        "jundot/omlx#1886q",
        "gemma4",
        '<|tool_call>call:f(a=<|"|>x<|"|>, n=3)<tool_call|>',
        False,
        Answer("", "", [("f", {"a": "x", "n": 3})]),
    ),
    (
        "raullenchai/Rapid-MLX#1102",
        "gemma4",
        '<|tool_call>call:f{opts:{message:<|"|>How are you?<|"|>},a:<|"|>x } y<|"|>}<tool_call|>',
        False,
        Answer("", "", [("f", {"opts": {"message": "How are you?"}, "a": "x } y"})]),
    ),
    (
        "sgl-project/sglang#40236 bare",
        "deepseek_v4",
        (
            '<｜DSML｜invoke name="f">\n'
            '<｜DSML｜parameter name="a" string="true">x'
            "</｜DSML｜parameter>\n</｜DSML｜invoke>"
        ),
        False,
        Answer("", "", [("f", {"a": "x"})]),
    ),
    (
        "sgl-project/sglang#40236 unterm",
        "deepseek_v4",
        (
            '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
            '<｜DSML｜parameter name="a" string="true">x'
            "</｜DSML｜parameter>\n</｜DSML｜invoke>"
        ),
        False,
        Answer("", "", [("f", {"a": "x"})]),
    ),
    (
        "sgl-project/sglang#39435",
        "deepseek_v4",
        (
            '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
            '<parameter name="a">true</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
        ),
        False,
        Answer("", "", [("f", {"a": "true"})]),
    ),
    (
        "vllm-project/vllm#45877",
        "deepseek_v4",
        (
            '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
            '<｜DSML｜parameter name="a" string="true">ls 2>&1'
            "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
        ),
        False,
        Answer("", "", [("f", {"a": "ls 2>&1"})]),
    ),
    (
        "ai-dynamo/frontend-crates#133",
        "minimax_m3",
        (
            "Think.]<]minimax[>[<tool_call>\n]<]minimax[>["
            '<invoke name="f">]<]minimax[>[<a>x]<]minimax[>[</a>]'
            "<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>"
        ),
        True,
        Answer("", "Think.", [("f", {"a": "x"})]),
    ),
    (
        "smg-project/smg#1728",
        "minimax_m2",
        (
            '<minimax:tool_call>\n<invoke name="g">\n'
            '<parameter name="q">x</parameter>\n</invoke>\n'
            "</minimax:tool_call>"
        ),
        False,
        Answer("", "", [("g", {"q": "x"})]),
    ),
    (
        "sgl-project/sglang#36691",
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        False,
        Answer("", "", [("now", {})]),
    ),
    (
        "sgl-project/sglang#21377",
        "kimi_k2",
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functionsf5"
            '<|tool_call_argument_begin|>{"a": "x"}<|tool_call_end|>'
            "<|tool_call_begin|>functionsf6"
            '<|tool_call_argument_begin|>{"a": "y"}<|tool_call_end|>'
            "<|tool_calls_section_end|>"
        ),
        False,
        Answer("", "", [("f", {"a": "x"}), ("f", {"a": "y"})]),
    ),
    (
        "exo-explore/exo#2281",
        "kimi_k2",
        (
            "<|tool_calls_section_begin|>"
            "<|tool_call_begin|>functions_f_1"
            '<|tool_call_argument_begin|>{"a": "x"}<|tool_call_end|>'
            "<|tool_calls_section_end|>"
        ),
        False,
        Answer("", "", [("f", {"a": "x"})]),
    ),
    (
        "ggml-org/llama.cpp#17376",
        "kimi_k2",
        (
            "<|tool_call_section_begin|>"
            "<|tool_call_begin|>functions.f:0"
            '<|tool_call_argument_begin|>{"a": "x"}<|tool_call_end|>'
            "<|tool_call_section_end|>"
        ),
        False,
        Answer("", "", [("f", {"a": "x"})]),
    ),
    (
        "sgl-project/sglang#35299",
        "harmony",
        '<|channel|>commentary to=functions.f to=functions.f<|message|>{"a": "x"}<|call|>',
        False,
        Answer("", "", [("f", {"a": "x"})]),
    ),
    (
        "ai-dynamo/frontend-crates#236 a",
        "harmony",
        "<|channel|>final\nHello you.",
        False,
        Answer("Hello you."),
    ),
    (
        "ai-dynamo/frontend-crates#236 b",
        "harmony",
        "<|channel|>finalx<|message|>Hello you.",
        False,
        Answer("Hello you."),
    ),
    (
        "openai/harmony#38",
        "harmony",
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
            "<|channel|>commentary––commentary to=functions.f"
            '<|message|>{"a": "x"}<|call|>'
        ),
        False,
        Answer("", "Hm.", [("f", {"a": "x"})]),
    ),
    (
        "openai/harmony#82",
        "harmony",
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final Hello<|return|>"),
        False,
        Answer("Hello", "Hm."),
    ),
    (
        "vllm-project/vllm#46464",
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|return|>",
        False,
        Answer("", "Hm."),
    ),
    (
        "vllm-project/vllm#47190 a",
        "glm45",
        "<tool_call>fa</arg_key><arg_value>echo test</arg_value></tool_call>",
        False,
        Answer("", "", [("f", {"a": "echo test"})]),
    ),
    (
        "vllm-project/vllm#47190 b",
        "glm45",
        "<tool_call>f a</arg_key><arg_value>x</arg_value></tool_call>",
        False,
        Answer("", "", [("f", {"a": "x"})]),
    ),
    (
        "vllm-project/vllm#54971 a",
        "glm45",
        "<tool_call>f\n<arg_key>a</arg_key></arg_key><arg_value>/tmp/x</arg_value></tool_call>",
        False,
        Answer("", "", [("f", {"a": "/tmp/x"})]),
    ),
    (
        "vllm-project/vllm#54971 b",
        "glm45",
        "<tool_call>f\n<arg_key><arg_key>a</arg_key><arg_value>/tmp/x</arg_value></tool_call>",
        False,
        Answer("", "", [("f", {"a": "/tmp/x"})]),
    ),
    ("vllm-project/vllm#41654", "glm45", "<tool_call>now</tool_call>", False, Answer("", "", [("now", {})])),
    (
        "fw-ai-external/python-sdk#119",
        "glm45",
        "<tool_call>now</arg_value></tool_call>",
        False,
        Answer("", "", [("now", {})]),
    ),
    (
        "vllm-project/vllm#49249",
        "glm45",
        "<tool_call>f<arg_key>a</arg_key>how many days</arg_value></tool_call>",
        False,
        Answer("", "", [("f", {"a": "how many days"})]),
    ),
    (
        "ai-dynamo/frontend-crates#60 a",
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a": "x"',
        False,
        Answer("", "", [("f", {"a": "x"})]),
    ),
    (
        "anthropics/claude-code#61375",
        "minimax_m2",
        (
            '<minimax:tool_call>\n<invoke name="f">\n'
            '<parameter name="a">see </invoke> and </parameter> here'
            '</parameter>\n<parameter name="b">y</parameter>\n'
            "</invoke>\n</minimax:tool_call>"
        ),
        False,
        Answer("", "", [("f", {"a": "see </invoke> and </parameter> here", "b": "y"})]),
    ),
    (
        "ollama/ollama#13764",
        "qwen3_coder",
        "Hm.\n<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>",
        True,
        Answer("", "Hm.", [("f", {"a": "x"})]),
    ),
    (
        "sgl-project/sglang#32567",
        "kimi_k3",
        ("Hm.<|close|>think<|open|>response<|sep|>Here<|close|>response<|sep|><|close|>message<|sep|>"),
        True,
        Answer("Here", "Hm."),
    ),
    (
        "smg-project/smg#1983",
        "kimi_k3",
        (
            '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
            '<|open|>argument key="a" type="string"<|sep|>SF'
            "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools"
            "<|sep|><|close|>message<|sep|>"
        ),
        True,
        Answer("", "", [("f", {"a": "SF"})]),
    ),
]


@pytest.mark.parametrize(
    ("name", "text", "is_open", "meant"), [one[1:] for one in WRITTEN], ids=[one[0] for one in WRITTEN]
)
def test_an_answer_is_read_as_it_is_meant(name: str, text: str, is_open: bool, meant: Answer) -> None:
    parser: AnswerParser
    for size in (len(text), 1, 3, 7):
        if name == "kimi_k3":
            parser = KimiK3Parser("<|open|>think<|sep|>" * is_open, reads_calls=True, schemas=SCHEMAS)
        else:
            parser = parser_of(name, is_open=is_open)
        events = [event for at in range(0, len(text), size) for event in parser.push(text[at : at + size])]
        assert Answer.of(joined([*events, *parser.finish("")])) == meant, size


def test_a_header_of_gpt_oss_that_is_too_long_shows_no_tags() -> None:
    parser = parser_of("harmony")
    text = "<|channel|>final " + "x" * 2000 + "<|end|><|start|>assistant<|channel|>final<|message|>y"
    assert Answer.of(joined([*parser.push(text), *parser.finish("")])) == Answer("x" * 2000 + "\n\ny")
