"""Grammars of calls in each model's own form: over vocabularies in which the tags are control tokens, or text."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from moeserve.chatformat.harmony import HarmonyParser
from moeserve.chatformat.output import OutputParser
from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.grammar.engine import GrammarEngine
from moeserve.grammar.relax import relaxed
from moeserve.grammar.spec import (
    ANY_OBJECT,
    Channels,
    Choice,
    Ebnf,
    GrammarSpec,
    GrammarTool,
    JsonOrToolCalls,
    JsonSchema,
    Regex,
    TaggedArgument,
    TextWithToolCalls,
    ToolCalls,
)
from moeserve.httpserver.generation.chat.chat_formats import ChatFormats, formats_of
from moeserve.httpserver.generation.chat.tagged_arguments import with_tagged_arguments
from moeserve.models.sources.gguf import open_gguf
from moeserve.tokenizer.text_tokenizer import TextTokenizer
from tests.support.chats import grammar_texts
from tests.support.chats.chat_events import Answer
from tests.support.chats.family_templates import HARMONY, TEMPLATES
from tests.support.models.family_vocabulary import write_family_model

SUM = GrammarTool(
    "sum",
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}',
)
NOW = GrammarTool("now", '{"type": "object", "properties": {}, "additionalProperties": false}')
A_SUM, A_NOW = ("sum", '{"a": 2}'), ("now", "{}")

# Formats in which no single token ends a call.
UNENDED = (
    "deepseek_v32",
    "deepseek_v4",
    "minimax_m2",
    "minimax_m3",
    "mistral",
    "mistral_json",
    "granite",
    "llama",
)
World = Callable[[str], tuple[TextTokenizer, GrammarEngine, ChatFormats]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder: Path = tmp_path_factory.mktemp("families")

    @cache
    def make(name: str) -> tuple[TextTokenizer, GrammarEngine, ChatFormats]:
        model = write_family_model(name, folder / f"{name}.gguf")
        tokenizer = TextTokenizer.from_gguf(open_gguf(model))
        template = (TEMPLATES | {"harmony": HARMONY})[name]
        formats = formats_of(ServerConfig(model=str(model)), tokenizer, template)
        return tokenizer, GrammarEngine(tokenizer), formats

    return make


def matches(tokenizer: TextTokenizer, engine: GrammarEngine, spec: GrammarSpec, text: str) -> bool:
    return grammar_texts.matches(engine, tokenizer, spec, text, parse_special=True)


def test_the_flags_names_of_formats(world: World) -> None:
    tools = {name: world(name)[2].names()[0] for name in (*TEMPLATES, "harmony")}
    assert all(name == found for name, found in tools.items())
    assert [world(name)[2].names()[1] for name in ("glm45", "harmony", "hermes")] == [
        "qwen3",
        "harmony",
        "none",
    ]
    tokenizer, _, _ = world("harmony")
    apart = ServerConfig(model="", tool_call_parser="none", reasoning_parser="auto")
    assert formats_of(apart, tokenizer, HARMONY).names() == ("none", "harmony")
    assert formats_of(ServerConfig(model=""), world("glm45")[0], HARMONY).channels is None
    with pytest.raises(ConfigError, match=r"--tool-call-parser harmony: .* no tokens <\|start\|>"):
        formats_of(ServerConfig(model="", tool_call_parser="harmony"), world("glm45")[0])


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_in_the_models_own_form(world: World, name: str) -> None:
    tokenizer, engine, formats = world(name)
    assert formats.tools is not None
    assert formats.call_form is not None
    assert formats.tool_open is not None
    assert (formats.call_end is None) == (name in UNENDED)
    guided, form = formats.tools.guided, formats.call_form

    def text(*calls: tuple[str, str]) -> str:
        bodies = [
            guided.before_name
            + (f"{tool}:{number}" if guided.numbered else tool)
            + guided.before_arguments
            + arguments
            + guided.behind
            for number, (tool, arguments) in enumerate(calls)
        ]
        if guided.is_block:
            return guided.open + guided.separator.join(bodies) + guided.close
        return guided.separator.join(guided.open + body + guided.close for body in bodies)

    def fits(spec: GrammarSpec, answer: str) -> bool:
        return matches(tokenizer, engine, spec, answer)

    one, both = text(A_SUM), text(A_NOW, A_SUM)
    broken = text(("sum", '{"a": "x"}'))
    only = ToolCalls([SUM, NOW], True, form)
    assert fits(only, one)
    assert fits(only, both)
    for wrong in ("hello", broken, text(("never", "{}")), one + " bye"):
        assert not fits(only, wrong)
    assert not fits(ToolCalls([SUM, NOW], False, form), both)
    among = TextWithToolCalls([SUM, NOW], True, form)
    for good in ("hello", one, f"Let me see.\n{both}", f"{one}\nand so on", "a < b"):
        assert fits(among, good), good
    assert not fits(among, f"Let me see. {broken}")
    assert not fits(TextWithToolCalls([SUM, NOW], False, form), both)
    either = JsonOrToolCalls('{"type": "boolean"}', [SUM], True, form)
    assert [fits(either, answer) for answer in ("true", one, "no", "true" + one)] == [
        True,
        True,
        False,
        False,
    ]
    parser = OutputParser(None, formats.tools.parser({}, "json"))
    assert Answer.of(parser.push(both) + parser.finish()).calls == [("now", {}), ("sum", {"a": 2})]


PAINT = GrammarTool(
    "paint",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "what": {"type": "string", "minLength": 1},
                "color": {"$ref": "#/$defs/Color"},
                "size": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
                "by": {"type": ["string", "null"]},
            },
            "required": ["what", "color"],
            "$defs": {"Color": {"type": "string", "enum": ["red", "blue"]}},
        }
    ),
)
WALL: dict[str, object] = {
    "what": "a <b>wall</b>\nand 2 > 1",
    "color": "blue",
    "size": 3,
    "by": "null and void",
}
IN_TAGS = {
    "glm45": "<tool_call>{}\n{}</tool_call>",
    "qwen3_coder": "<tool_call>\n<function={}>\n{}</function>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="{}">\n{}</invoke>\n</minimax:tool_call>',
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="{}">\n{}</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
}
ARGUMENT = {
    "glm45": "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n",
    "qwen3_coder": "<parameter={}>\n{}\n</parameter>\n",
    "minimax_m2": '<parameter name="{}">{}</parameter>\n',
    "deepseek_v4": '<｜DSML｜parameter name="{0}" string="{2}">{1}</｜DSML｜parameter>\n',
}


@pytest.mark.parametrize("name", IN_TAGS)
def test_calls_in_the_models_own_tags(world: World, name: str) -> None:
    tokenizer, engine, formats = world(name)
    assert formats.own_form is not None
    assert formats.own_form.tags is not None
    tools = with_tagged_arguments([SUM, NOW, PAINT], bool(formats.own_form.tags.before_json))
    assert tools is not None

    def text(tool: str, arguments: dict[str, object]) -> str:
        values = [
            (k, v, "true") if isinstance(v, str) else (k, json.dumps(v), "false")
            for k, v in arguments.items()
        ]
        return IN_TAGS[name].format(tool, "".join(ARGUMENT[name].format(*value) for value in values))

    def fits(spec: GrammarSpec, answer: str) -> bool:
        return matches(tokenizer, engine, spec, answer)

    only = ToolCalls(tools, False, formats.own_form)
    assert formats.tools is not None
    schemas = {tool.name: json.loads(tool.schema) for tool in tools}
    calls: list[tuple[str, dict[str, object]]] = [
        ("paint", WALL), ("paint", WALL | {"by": None}), ("sum", {"a": -12}), ("now", {})
    ]  # fmt: skip
    calls.append(("paint", {"what": " ", "color": "red"}))
    for tags in (
        "</parameter> here",
        "</arg_value> or </tool_call>",
        "ends with </parameter>",
        'return "</arg_value>"',
    ):
        calls.append(("paint", {"what": tags, "color": "red", "by": tags}))
    for tool, arguments in calls:
        answer = text(tool, arguments)
        assert fits(only, answer), answer
        parser = OutputParser(None, formats.tools.parser(schemas, "own"))
        assert Answer.of(parser.push(answer) + parser.finish("")).calls == [(tool, arguments)]
    wrong: list[tuple[str, dict[str, object]]] = [
        ("paint", WALL | {"color": "green"}),
        ("paint", {"color": "red"}),
        ("paint", {"what": "", "color": "red"}),
        ("paint", WALL | {"size": "big"}),
        ("paint", WALL | {"more": "x"}),
        ("sum", {"a": "x"}),
        ("never", {}),
    ]
    for tool, arguments in wrong:
        assert not fits(only, text(tool, arguments)), (tool, arguments)
    one, other = text("now", {}), text("sum", {"a": 1})
    both = f"{one}\n{other}"
    if formats.own_form.is_block:
        open_tag, end = str(formats.own_form.open), str(formats.own_form.close[0])
        both = one.removesuffix(end) + other.removeprefix(open_tag)
    assert fits(ToolCalls(tools, True, formats.own_form), both), both
    assert not fits(only, both)
    among = TextWithToolCalls([*tools[:2], replace(PAINT, schema=ANY_OBJECT.schema)], True, formats.own_form)
    assert fits(among, "Let me see.\n" + text("paint", {"free": "<i>", "what": ""}))
    assert not fits(among, "Let me see.\n" + text("sum", {"a": "x"}))
    assert relaxed(only, set()) is not None
    if name == "glm45":  # 4.7 writes no line ends
        assert fits(only, text("sum", {"a": 1}).replace("\n", ""))
    if name == "deepseek_v4":  # the tag's word is held to the schema, too
        assert not fits(only, text("sum", {"a": 1}).replace('"false"', '"true"'))
        assert not fits(only, text("paint", WALL).replace('"true"', '"false"'))


def test_tags_that_say_the_type_take_lists_of_strings_and_others() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["1", 1, None]}, "b": {}, "c": {"enum": ["<b>"]}},
    }
    tool = GrammarTool("f", json.dumps(schema))
    (found,) = with_tagged_arguments([tool], tags_say_type=True) or []
    assert found.arguments == [
        TaggedArgument("a", False, words=["1"], other_schema='{"enum": [1, null]}'),
        TaggedArgument("b", False, other_schema="{}"),
        TaggedArgument("c", False, words=["<b>"]),
    ]
    assert with_tagged_arguments([tool]) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a"}}},
        {"type": "object", "properties": {"a": {"enum": ["1", 1]}}},
        {"type": "object", "properties": {"a": {"enum": ["<b>"]}}},
        {"type": "object", "properties": {"a b": {"type": "string"}}},
        {"type": "object", "properties": {"a": {}}, "required": ["b"]},
        {"type": "object", "properties": {"a": {}}, "minProperties": 1},
        {"type": "object", "properties": {"a": False}},
        {"type": "object", "properties": {"a": {"type": "object", "properties": {"next": {"$ref": "#"}}}}},
        {"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 2}]}}},
        {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}]}}},
        {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}] * 20}}},
        {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"anyOf": [{"enum": []}] * 20}}},
        {"type": "object", "properties": {"a": {"type": [{"x": 1}]}}, "$defs": []},
        {"type": "object", "properties": {"a": {}}, "required": [["a"]]},
    ],
)  # fmt: skip
def test_schemas_that_only_json_can_be_held_to(schema: dict[str, object]) -> None:
    assert with_tagged_arguments([GrammarTool("f", json.dumps(schema))]) is None


def test_definitions_that_every_argument_would_repeat() -> None:
    """The text would be 400 MB."""
    schema = {
        "type": "object",
        "properties": {f"a{n}": {"type": "integer"} for n in range(20_000)},
        "$defs": {"x": {"enum": list(range(4000))}},
    }
    assert with_tagged_arguments([GrammarTool("f", json.dumps(schema))]) is None
    del schema["$defs"]
    assert with_tagged_arguments([GrammarTool("f", json.dumps(schema))]) is not None


def test_annotations_do_not_keep_a_schema_from_tags() -> None:
    text = {"type": "string", "format": "password", "x-order": 1, "nullable": True}
    schema = {"type": "object", "properties": {"a": text}, "$schema": "any", "x-fastmcp": {}}
    (tool,) = with_tagged_arguments([GrammarTool("f", json.dumps(schema))]) or []
    assert tool.arguments == [TaggedArgument("a", False)]


THINKS = "<|channel|>analysis<|message|>hm <b><|end|><|start|>assistant"
BEFORE = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
TEXT = "<|channel|>final<|message|>"
TO = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"
NONE: list[GrammarTool] = []


@pytest.mark.parametrize(
    ("answer", "tools", "must_call", "max_reasoning", "good", "bad"),
    [
        (None, [SUM, NOW], True, None, [THINKS + TO.format(*A_SUM), THINKS + BEFORE + TO.format(*A_NOW)], [TEXT]),
        (None, [SUM], False, None, [TEXT + "hi", THINKS + BEFORE + TEXT, TO.format(*A_SUM)], [TO.format(*A_NOW)]),
        (None, [SUM], False, None, [], [TO.format("sum", '{"a": "x"}'), "hi"]),
        (None, NONE, False, None, [TEXT + "hi", THINKS + THINKS + TEXT + "hi"], [TO.format(*A_SUM), BEFORE + TEXT]),
        (None, NONE, False, 6, [THINKS + TEXT, TEXT], [THINKS + THINKS + TEXT, THINKS.replace("hm", "hmm") + TEXT]),
        (None, [SUM], False, 0, [TEXT, BEFORE + TO.format(*A_SUM)], [THINKS + TEXT]),
        (JsonSchema('{"type": "integer"}'), NONE, False, None, [THINKS + TEXT + "12"], [TEXT + "x", "12"]),
        (JsonSchema('{"type": "integer"}'), [SUM], False, 9, [TEXT + "12", TO.format(*A_SUM)], [TEXT + "x"]),
        (Regex("a/b+"), NONE, False, None, [THINKS + TEXT + "a/bb"], [TEXT + "a/"]),
        (Choice(["yes", "no"]), NONE, False, None, [TEXT + "no"], [TEXT + "nope"]),
        (Ebnf('root ::= "a" | "b"'), NONE, False, None, [TEXT + "b"], [TEXT + "c"]),
        (Ebnf('start: "a"+ TEXT\nTEXT: /[0-9]/'), NONE, False, None, [THINKS + TEXT + "aa1"], [TEXT + "aab"]),
    ],
)  # fmt: skip
def test_channels(
    world: World,
    answer: JsonSchema | Regex | Ebnf | Choice | None,
    tools: list[GrammarTool],
    must_call: bool,
    max_reasoning: int | None,
    good: list[str],
    bad: list[str],
) -> None:
    tokenizer, engine, formats = world("harmony")
    assert formats.channels is not None
    spec = Channels(dict(formats.channels.tokens), answer, tools, must_call, max_reasoning)
    for text in good:
        assert matches(tokenizer, engine, spec, text), text
        parser = HarmonyParser("<|start|>assistant", reads_calls=True)
        read = Answer.of(parser.push(text) + parser.finish())
        assert bool(read.calls) == ("functions." in text)
        assert "<|" not in read.text + read.reasoning
    for text in bad:
        assert not matches(tokenizer, engine, spec, text), text
    assert bool(relaxed(spec, set())) == bool(tools)
