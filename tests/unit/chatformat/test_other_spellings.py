"""Calls in spellings that are not their format's, but leave no doubt: from public reports (vllm#49248, sglang#21377,
exo#2281, omlx#1886, vllm#51075, vllm-gaudi#1724, harmony#114). Whole, character by character and cut, they are the
same."""

from __future__ import annotations

from typing import Any, Final

import pytest

from moeserve.chatformat.offered_names import offered_name
from moeserve.chatformat.values import value_of_text
from tests.support.chats.chat_events import Answer
from tests.support.chats.chat_families import tags_of
from tests.support.chats.written_answers import call, read

XY: Final = {"a": "x", "b": "y"}
ONE: Final = Answer("", "", [("f", XY)])
TWO: Final = Answer("", "", [("f", XY)] * 2)
JSON: Final = '{"a": "x", "b": "y"}'
PARAMETERS: Final = "<parameter=a>\nx\n</parameter>\n<parameter=b>\ny\n</parameter>\n"
CODER: Final = f"<tool_call>\n<function=f>\n{PARAMETERS}</function>\n</tool_call>"
GLM: Final = call("glm45", XY)
SEED: Final = call("seed_oss", XY)
PHI4: Final = call("phi4_mini", XY)
M2: Final = call("minimax_m2", XY)
M3: Final = call("minimax_m3", XY)
MARK: Final = "]<]minimax[>["
HERMES: Final = f'<tool_call>\n{{"name": "f", "arguments": {JSON}}}\n</tool_call>'


def kimi(name: str) -> str:
    inner = f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{JSON}<|tool_call_end|>"
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def harmony(recipient: str) -> str:
    return f"<|channel|>commentary to={recipient} <|constrain|>json<|message|>{JSON}<|call|>"


def gemma(text: str) -> str:
    return f"<|tool_call>call:{text}<tool_call|>"


def hermes(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


NAMES: Final = (
    *(("kimi_k2", kimi(n)) for n in ("functionsf5", "functions_f_1", "functions.f_0", "f_0", "functions.f")),
    *(
        ("harmony", harmony(n))
        for n in ("functions/f", '"functions.f"', "assistant.f", " functions.f", "f:0")
    ),
    *(("gemma4", gemma(f'{name}{{a:<|"|>x<|"|>,b:"y"}}')) for name in ("default_api.f", "functions.f", "f:")),
    ("glm45", GLM.replace("<tool_call>f", "<tool_call>functions.f")),
    ("hermes", HERMES.replace('"f"', '"functions.f"')),
    ("qwen3_coder", CODER.replace("=f>", '="f">')),
    ("qwen3_coder", CODER.replace("=f>", ' name="f">')),
    ("qwen3_coder", CODER.replace("<function=", "<function = ")),
    ("gemma4", gemma('google:mcp:text:f{a:<|"|>x<|"|>,b:"y"}')),
    ("deepseek_v31", call("deepseek_v31", XY).replace("begin｜>f<", "begin｜>function<｜tool▁sep｜>f<")),
    # a tool in the place of the role or the channel
    (
        "harmony",
        f"<|channel|>analysis<|message|><|end|><|start|>functions.f<|channel|>commentary<|message|>{JSON}",
    ),
    ("harmony", f"<|channel|>functions.f <|constrain|>json<|message|>{JSON}<|call|>"),
)
TAGS: Final = (
    ("qwen3_coder", CODER.replace("<parameter=a>", '<parameter name="a">')),
    ("qwen3_coder", CODER.replace("<parameter=b>", '<parameter="b">')),
    ("qwen3_coder", CODER.replace("<parameter=b>", '<parameter=name="b">')),
    ("qwen3_coder", CODER.replace("<parameter=b>", '<parameter=b type="string">')),
    ("qwen3_coder", CODER.replace("<parameter=b>", '<parameter name="b" type="string">')),
    ("qwen3_coder", CODER.replace("<tool_call>", "<tool_call>\n<tool_call>")),
    ("qwen3_coder", f"{CODER}\n</tool_call>"),
    ("qwen3_coder", CODER.replace("</function>", "</function>\n</function>")),
    ("qwen3_coder", CODER.replace(PARAMETERS, JSON + "\n")),
    ("seed_oss", SEED),
    ("seed_oss", CODER),
    ("seed_oss", SEED.replace("seed:tool_call", "tool_call")),
    ("seed_oss", SEED.replace("<seed:tool_call>", "<tool_call>")),
    ("seed_oss", SEED.replace("<parameter=a>", '<parameter name="a">')),
    ("seed_oss", SEED.replace("<parameter=a>x", "<parameter=a>\nx\n")),
    ("seed_oss", f"<seed:tool_call>\n{SEED}"),
    ("seed_oss", f'<seed:tool_call>{{"name": "f", "arguments": {JSON}}}</seed:tool_call>'),
    ("seed_oss", f"<seed:tool_call>\n<function=f>\n{JSON}\n</function>\n</seed:tool_call>"),
    ("glm45", GLM.replace("<tool_call>", "<tool_call>\n<tool_call>")),
    ("glm45", f"<tool_call>f\n{JSON}\n</tool_call>"),
    ("glm45", f"<tool_call>f{JSON}</tool_call>"),
    ("glm45", CODER),
    ("minimax_m2", M2.replace('"', "'")),
    ("minimax_m2", M2.replace('"', "")),
    ("minimax_m2", M2.replace('"f"', '"f" ')),
    ("minimax_m2", M2.replace('"a"', '"a" type="string"')),
    ("minimax_m2", M2.replace("<minimax:tool_call>\n", "").replace("\n</minimax:tool_call>", "")),
    ("minimax_m2", M2.replace("minimax:tool_call", "tool_call")),
    ("minimax_m2", M2.replace('<parameter name="a">', "<parameter=a>")),
    ("minimax_m3", M3.replace("<invoke", "invoke")),
    ("minimax_m3", M3.replace("<a>", "")),
    ("kimi_k2", kimi("f").replace("<|tool_call_begin|>", "")),
)
BRACKETS: Final = (
    ("phi4_mini", PHI4.replace("[", "").replace("]", "")),
    ("phi4_mini", PHI4.removesuffix("<|/tool_call|>")),
    ("phi4_mini", PHI4.replace("<|tool_call|>", "<|tool_call|>\n<|tool_call|>")),
    ("phi4_mini", PHI4.replace("<|/tool_call|>", "<|tool_call|>")),
    ("phi4_mini", PHI4.replace("[", "```json\n[").replace("]", "]\n```")),
    ("phi4_mini", PHI4.replace('"', "'")),
    ("phi4_mini", PHI4.replace("arguments", "parameters")),
    ("phi4_mini", PHI4.replace('"f"', '"functions.f"')),
    ("gemma4", gemma('f(a=<|"|>x<|"|>, b="y")')),
    ("gemma4", gemma("f(a='x', b='y')")),
    ("gemma4", gemma("f(\n a='x', b='y')")),
    ("gemma4", gemma('f({"a": "x", "b": "y"})')),
    ("gemma4", gemma('f( {a:<|"|>x<|"|>,b:<|"|>y<|"|>} )')),
    ("kimi_k2", kimi("f").replace("{", "```json\n{").replace("}", "}\n```")),
    ("deepseek_v31", call("deepseek_v31", XY).replace("{", "```json\n{").replace("}", "}\n```")),
    ("gemma4", gemma('f{a:<|"|>x<|"|>b:<|"|>y<|"|>}')),
    ("gemma4", gemma('f{a:<|"|>x<|"|>\n b:<|"|>y<|"|>}')),
    ("hermes", CODER),
    ("hermes", HERMES.replace("</tool_call>", "<tool_call>")),
    ("hermes", HERMES.removesuffix(">")),
    ("hermes", HERMES.replace("<tool_call>", "<tool_call>\n<tool_call>")),
    ("hermes", hermes(f'{{{{"name": "f", "arguments": {JSON}}}}}')),
    ("hermes", hermes(f'```json\n{{"name": "f", "arguments": {JSON}}}\n```')),
    ("hermes", hermes(f'{{"type": "function", "function": {{"name": "f", "arguments": {JSON}}}}}')),
    *(("hermes", hermes(f'{{"name": "f", "{key}": {JSON}}}')) for key in ("args", "input", "parameters")),
    *(("hermes", hermes(f'{{"{key}": "f", "arguments": {JSON}}}')) for key in ("tool", "function")),
    ("hermes", hermes('{name: "f", arguments: {a: "x", b: "y"}}')),
    ("hermes", hermes('{"name": "f", "arguments": {"a": """x""", "b": \'\'\'y\'\'\'}}')),
)


@pytest.mark.parametrize(("name", "text"), [*NAMES, *TAGS, *BRACKETS])
def test_a_call_in_another_spelling(name: str, text: str) -> None:
    assert read(name, text) == ONE


def test_two_calls_between_one_pair_of_tags() -> None:
    one = f'{{"name": "f", "arguments": {JSON}}}'
    assert read("hermes", hermes(f"{one}\n{one}")) == TWO


@pytest.mark.parametrize(
    "between", [", ", ",\n", "\n", "", "]<|/tool_call|><|tool_call|>[", "]<|/tool_call|>\n<|tool_call|>["]
)
@pytest.mark.parametrize("brackets", ["[]", ""])
def test_two_calls_of_phi_4_mini(between: str, brackets: str) -> None:
    """In one list, in no list, and in a list each."""
    if not brackets:
        between = between.replace("[", "").replace("]", "")
    one = f'{{"name": "f", "arguments": {JSON}}}'
    begin, end = brackets[:1], brackets[1:]
    assert read("phi4_mini", f"<|tool_call|>{begin}{one}{between}{one}{end}<|/tool_call|>") == TWO


@pytest.mark.parametrize("written", ["null", '""'])
def test_a_call_that_says_it_has_no_arguments(written: str) -> None:
    assert read("hermes", hermes(f'{{"name": "now", "arguments": {written}}}')) == Answer(
        "", "", [("now", {})]
    )


def test_repeated_tags_around_no_call_stay_text() -> None:
    for text in ("<tool_call>\n<tool_call> are tags", "<tool_call>\n<tool_call>\n", '{"name": "Ann"}'):
        assert read("hermes", text) == Answer(text, "", [])
    assert read("llama", '{"name": "Ann"}') == Answer('{"name": "Ann"}', "", [])


def test_a_name_that_is_offered_or_means_no_tool_is_unchanged() -> None:
    assert offered_name("functions.f", ["functions.f", "f"]) == "functions.f"
    assert offered_name("f_0", ["f_0", "f"]) == "f_0"
    assert offered_name("g_0", ["f"]) == "g_0"
    assert offered_name("mcp.server.f", ["f"]) == "f"


@pytest.mark.parametrize(
    ("written", "kind", "value"),
    [
        ('"5"', "integer", 5),
        ("'5'", "integer", 5),
        ("+5", "integer", 5),
        ("05", "integer", "05"),
        (".5", "number", 0.5),
        ("('a', 'b')", "array", ["a", "b"]),
        ("[('a', 1), None]", "array", [["a", 1], None]),
        ("()", "array", []),
        ("{'t': (1, 2), 'k': True}", "object", {"t": [1, 2], "k": True}),
        ("{k: 1, 2: 'x'}", "object", {"k": 1, "2": "x"}),
        ('"{\\"k\\": 1}"', "object", {"k": 1}),
        ('```json\n{"k": 1}\n```', "object", {"k": 1}),
        ("'x'", "integer", "'x'"),
        ("(a, b)", "array", "(a, b)"),
    ],
)
def test_values_in_pythons_and_in_quotes(written: str, kind: str, value: Any) -> None:
    assert value_of_text(written, frozenset({kind})) == value


# ---- tags that are missing, repeated or cut short (vllm#47190, vllm#54971, llama.cpp#27720)

DEEPSEEK: Final = call("deepseek_v31", XY)
HARMONY: Final = harmony("functions.f")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        # the tag before a key
        ("glm45", GLM.replace("<tool_call>f\n<arg_key>a", "<tool_call>fa")),
        ("glm45", GLM.replace("<tool_call>f\n<arg_key>a", "<tool_call>f a")),
        ("glm45", GLM.replace("<arg_key>b", "b")),
        ("glm45", GLM.replace("<arg_key>", "<arg_key>\n ")),
        ("glm45", GLM.replace("<arg_key>", "<arg_key><arg_key>")),
        ("glm45", GLM.replace("</arg_key>", "</arg_key></arg_key>")),
        ("glm45", GLM.replace("\n", "\r\n")),
        ("glm45", GLM.removesuffix(">")),
        ("glm45", GLM.replace("x</arg_value>", "x</arg_key>")),
        ("glm45", GLM.replace("<arg_value>x", "</arg_value>x")),
        ("hy_v3", call("hy_v3", XY).replace("<arg_key:opensource>b", "b")),
        # a bracket
        ("qwen3_coder", CODER.replace("</function>", "</function")),
        ("qwen3_coder", CODER.replace("<parameter=b>", "<parameter=b")),
        ("qwen3_coder", CODER.replace("<parameter=a>", "<parameter=a")),
        ("qwen3_coder", CODER.replace("\n", "\r\n")),
        ("qwen3_coder", CODER.replace("</parameter>", "</param>")),
        ("qwen3_coder", CODER.replace("</parameter>", "</ parameter>")),
        ("minimax_m2", M2.replace("</invoke>", "</invoke")),
        ("deepseek_v4", call("deepseek_v4", XY).replace("invoke>", "invoke")),
        # the block's tags, repeated ones
        ("hy_v3", call("hy_v3", XY).replace("<tool_calls:opensource>\n", "")),
        ("hy_v3", call("hy_v3", XY).replace("</tool_call:opensource>", "</tool_call:opensource>" * 2)),
        ("minimax_m3", M3.replace(f"{MARK}<tool_call>\n", "")),
        ("minimax_m3", M3.replace('<invoke name="f">', f'<invoke name="f">{MARK}<invoke name="f">')),
        ("minimax_m3", M3.replace(f"{MARK}</a>", "")),
        ("minimax_m3", M3.replace(f"{MARK}</a>", f"{MARK}</a>" * 2)),
        ("minimax_m3", M3.replace(f"{MARK}</invoke>", f"{MARK}</invoke>" * 2)),
        ("gemma4", "<|tool_call>" + call("gemma4", XY)),
        ("gemma4", call("gemma4", XY).replace('a:<|"|>', "a:")),
        ("lfm2", "<|tool_call_start|>" + call("lfm2", XY)),
        ("mistral", "[TOOL_CALLS]" + call("mistral", XY)),
        ("mistral_json", "[TOOL_CALLS]" + call("mistral_json", XY)),
        ("mistral", call("mistral", XY).replace("[ARGS]", "[ARGS][ARGS]")),
        ("kimi_k2", kimi("f").replace("<|tool_call_begin|>", "<|tool_call_begin|>" * 2)),
        ("deepseek_v31", DEEPSEEK.replace("<｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>" * 2)),
        # what stands between a name and its arguments
        ("kimi_k2", kimi("functions.f:0").replace("<|tool_call_argument_begin|>", "")),
        ("kimi_k2", kimi("\n functions.f:0")),
        ("deepseek_v31", DEEPSEEK.replace("<｜tool▁sep｜>", "")),
        ("deepseek_v31", DEEPSEEK.replace("begin｜>f", "begin｜>\nf")),
        ("harmony", HARMONY.replace("<|message|>", "")),
        ("harmony", HARMONY.replace("<|channel|>", "")),
    ],
)
def test_tags_that_are_missing_repeated_or_cut_short(name: str, text: str) -> None:
    assert text != call(name, XY)
    assert read(name, text) == ONE


NOW: Final = "<tool_call>\n{}\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", NOW.format('{"name": "now"}')),
        ("qwen3_coder", NOW.format("<function=now/>")),
        ("qwen3_coder", NOW.format('<function name="now" />')),
        ("kimi_k2", kimi("functions.now:0").replace(JSON, "")),
        ("granite", '<|tool_call|>[{"name": "now"}]'),
    ],
)
def test_a_call_without_arguments(name: str, text: str) -> None:
    assert read(name, text) == Answer("", "", [("now", {})])


def test_values_that_may_mean_an_empty_one() -> None:
    """The tag that closes a value may stand for the one that opens it, if text follows."""
    empty = GLM.replace("<arg_value>x</arg_value>", "</arg_value>")
    assert read("glm45", empty).calls == [("f", {"a": "", "b": "y"})]
    begins = GLM.replace(">x<", "></arg_value>x<")
    assert read("glm45", begins).calls == [("f", {"a": "</arg_value>x", "b": "y"})]


def test_a_result_that_gpt_oss_invents_is_no_call() -> None:
    result = f"<|start|>functions.f to=assistant<|channel|>commentary<|message|>{JSON}"
    assert read("harmony", f"<|channel|>analysis<|message|>Hm<|end|>{result}") == Answer(JSON, "Hm")


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("{a:meet at 10:00, 11:00 tomorrow}", {"a": "meet at 10:00, 11:00 tomorrow"}),
        ("{a:Hello, world, b:y}", {"a": "Hello, world", "b": "y"}),
        ("{\n  a: Hello, you,\n  b: y,\n}", {"a": "Hello, you", "b": "y"}),
        ('{a:one, two,b:"y"}', {"a": "one, two", "b": "y"}),
        ('{a:one, two,<|"|>b<|"|>:<|"|>y<|"|>}', {"a": "one, two", "b": "y"}),
        ("(a=one, two, b=y)", {"a": "one, two", "b": "y"}),
        ("{opts:{k:one, two,l:[a b, c]},n:5}", {"opts": {"k": "one, two", "l": ["a b", "c"]}, "n": 5}),
        ("{n:5,a:x}", {"n": 5, "a": "x"}),
    ],
)
def test_commas_in_gemmas_text_without_quotes(written: str, arguments: dict[str, Any]) -> None:
    """unslothai/unsloth#5624: half of a time became an argument's name."""
    assert read("gemma4", gemma("f" + written)).calls == [("f", arguments)]


@pytest.mark.parametrize("name", ["hermes", "glm45", "gemma4", "minimax_m3", "mistral", "hy_v3"])
def test_a_closing_tag_of_reasoning_that_is_repeated(name: str) -> None:
    tags = tags_of(name)
    close = tags.close
    for behind in (close, f"\n{close}", f"\n\n{close}\n\n{close}"):
        answer = Answer("Hi", "Hm")
        assert read(name, f"Hm{close}{behind}\n\nHi", is_open=True) == answer
        assert read(name, f"{tags.open}\nHm{close}{behind}Hi") == answer
    assert read(name, f"{close}\n\nHi") == Answer("Hi")  # without reasoning
    for kept in (f"{close[:-1]}", f"{close[:-1]} Hi", f"Hi {close} ho", f"Hi\n\n{close}"):
        assert read(name, f"Hm{close}\n{kept}", is_open=True) == Answer(kept, "Hm")


def test_tags_that_are_missing_or_cut_short_in_prose() -> None:
    """What looks like them is text."""
    for name, text in (
        ("glm45", "<tool_call>f and a thing</tool_call>"),
        ("glm45", "<tool_call>fz</arg_key>"),
        ("qwen3_coder", "<function=f> is a tag\n</function"),
        ("hy_v3", "<tool_call:opensource>\nis a tag"),
    ):
        assert read(name, text) == Answer(text)
    value = "x</arg_value>\nb</arg_value> and c</arg_key> </function\n"
    assert read("glm45", call("glm45", {"a": value})).calls == [("f", {"a": value})]


def test_gpt_oss_headers_that_have_no_message() -> None:
    assert read("harmony", "<|channel|>commentary to=functions.now<|message|>").calls == [("now", {})]
    assert read("harmony", "<|channel|>The answer is 5.") == Answer("The answer is 5.")
    assert read("harmony", '<|channel|>commentary to=assistant<|message|>{"n": 1}') == Answer('{"n": 1}')
    assert read("harmony", "<|channel|>final") == Answer()
