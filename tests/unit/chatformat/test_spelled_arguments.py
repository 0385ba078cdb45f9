"""Arguments of calls as models spell them: JSON with slips or in place of tags, Gemma's spellings, LFM2's Python."""

from __future__ import annotations

from typing import Any

import pytest

from moeserve.chatformat.events import CallBroken, CallStart
from moeserve.chatformat.formats import TOOL_FORMATS
from moeserve.chatformat.output import joined
from tests.support.chats.chat_events import Answer
from tests.support.chats.written_answers import call, parser_of, read

# ---- JSON as models write it


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"a": "one\ntwo\r\n\tthree"}', {"a": "one\ntwo\r\n\tthree"}),
        ('{"a": "\\d+ \\\'x\\\' \\u12 \\x41 \\/"}', {"a": "\\d+ 'x' \\u12 \\x41 /"}),
        ('{"a": "echo "hi" to all"}', {"a": 'echo "hi" to all'}),
        ('{"a": "echo "hi"", "b": "y"}', {"a": 'echo "hi"', "b": "y"}),
        ("{'a': 'it\\'s', 'n': 1}", {"a": "it's", "n": 1}),
        ("{'a': \"it's\", 'opts': {'x': None, 'y': [True]}}", {"a": "it's", "opts": {"x": None, "y": [True]}}),
        ('{"a": "x", "refs": ["y",],}', {"a": "x", "refs": ["y"]}),
        ('{"a" : "x" , "n" : -1.5e3 }', {"a": "x", "n": -1500}),
        ('{"a": "x",\n "b": "y\n"\n}', {"a": "x", "b": "y\n"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["hermes", "deepseek_v3", "deepseek_v31", "kimi_k2", "harmony", "gemma4"])
def test_unmistakable_json_is_read(name: str, written: str, arguments: dict[str, Any]) -> None:
    text = call(name, {"a": "MARK"})
    plain = '{a:<|"|>MARK<|"|>}' if name == "gemma4" else '{"a": "MARK"}'
    assert read(name, text.replace(plain, written)) == Answer("", "", [("f", arguments)])


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "gemma4"])
def test_json_in_the_place_of_tags_is_read(name: str) -> None:
    tags = TOOL_FORMATS[name].tags
    body = '\n{"name": "f", "arguments": {"a": "x"}}\n'
    f = ("f", {"a": "x"})
    assert read(name, tags.open + body + tags.close) == Answer("", "", [f])
    assert read(name, tags.open + body[:-2] + tags.close) == Answer("", "", [f])
    assert read(name, (tags.open + body + tags.close) * 2).calls == [f, f]


def test_arguments_within_a_string_are_read() -> None:
    text = '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"x\\"}"}</tool_call>'
    assert read("hermes", text) == Answer("", "", [("f", {"a": "x"})])


@pytest.mark.parametrize(
    "written",
    [
        '{"a": "x" "b": "y"}',
        '{"a": x}',
        '{"a": "x"; "b": 1}',
        '{"a" "x"}',
        '{"a": NaN}',
        '{"a": 01}',
    ],
)
def test_json_that_may_mean_anything_is_text(written: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
    assert read("hermes", text) == Answer(text)


def test_a_call_that_breaks_late_shows_all_of_its_rest() -> None:
    parser = parser_of("hermes")
    text = '<tool_call>{"name": "f", "arguments": {"a": "x" '
    events = joined([*parser.push(text), *parser.finish()])
    assert isinstance(events[0], CallStart)
    assert events[-1] == CallBroken(0, text, '" ')


# ---- Gemma's spellings


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        (
            'call:f{opts:{"mode": "fast", "n": 1},refs:["x"]}',
            {"opts": {"mode": "fast", "n": 1}, "refs": ["x"]},
        ),
        ('call:f{"opts":{},refs:[<|"|>x<|"|>]}', {"opts": {}, "refs": ["x"]}),
        ('call:f{"a":"has } brace","n":1}', {"a": "has } brace", "n": 1}),
        ("call:f{refs:['x', 'y'],n:2}", {"refs": ["x", "y"], "n": 2}),
        ("call:f{a='report.docx'}", {"a": "report.docx"}),
        ('call:f{a:<|"|>x<|"|>,b="y"}', {"a": "x", "b": "y"}),
        ("call:f{a:fast, n:1}", {"a": "fast", "n": 1}),
        ("call:f{opts:{Basic LLM Chain:{n:1}}}", {"opts": {"Basic LLM Chain": {"n": 1}}}),
        ('call:f{<|"|>a<|"|>:<|"|>x<|"|>}', {"a": "x"}),
        ('call:f{a:<|"|>say <|"|>hi<|"|> to all<|"|>}', {"a": 'say <|"|>hi<|"|> to all'}),
        ('call:f{a:<|"|>C:\\dir\n"x"<|"|>}', {"a": 'C:\\dir\n"x"'}),
        ("call:f{opts:{on:True,off:False,x:None}}", {"opts": {"on": True, "off": False, "x": None}}),
        ("call: f {n: 1, }", {"n": 1}),
        ("f{n:1}", {"n": 1}),
    ],
)
def test_gemmas_spellings(written: str, arguments: dict[str, Any]) -> None:
    assert read("gemma4", f"<|tool_call>{written}<tool_call|>") == Answer("", "", [("f", arguments)])


# ---- LFM2's Python


@pytest.mark.parametrize(
    ("written", "calls"),
    [
        ("[browser_navigate(url='/home/user1/workspace')]", [("browser_navigate", {"url": "/home/user1/workspace"})]),
        ("[Read(path='/home/user/foo.c')]", [("Read", {"path": "/home/user/foo.c"})]),
        ('[grocery.orderIngredients(items=["a", \'b\'], when={"day": 1})]',
         [("grocery.orderIngredients", {"items": ["a", "b"], "when": {"day": 1}})]),
        ("[f(a='x', n=-1.5, on=True, off=False, none=None), g()]",
         [("f", {"a": "x", "n": -1.5, "on": True, "off": False, "none": None}), ("g", {})]),
        ("[f(text='It's here, isn't it')]", [("f", {"text": "It's here, isn't it"})]),
        ("[f(text='say \\'hi\\' (now)')]", [("f", {"text": "say 'hi' (now)"})]),
        ("f(a='x')", [("f", {"a": "x"})]),  # without the list
        ("[f(a='x')][g(b=2)]", [("f", {"a": "x"})]),  # what stands behind a list is text
        ('[{"name": "f", "arguments": {"a": "x"}}, {"name": "g", "arguments": {}}]', [("f", {"a": "x"}), ("g", {})]),
        ('{"name": "f", "arguments": {"a": "x"}}', [("f", {"a": "x"})]),
        ("[\n  f(\n    a = 'x',\n  )\n]", [("f", {"a": "x"})]),
        ("[f(mode=fast)]", [("f", {"mode": "fast"})]),
    ],
)  # fmt: skip
def test_calls_in_python(written: str, calls: list[Any]) -> None:
    answer = read("lfm2", f"<|tool_call_start|>{written}<|tool_call_end|>")
    assert answer.calls == calls
    assert not answer.text or "g(" in answer.text


@pytest.mark.parametrize(
    "written", ["[f('x')]", "[f(1)]", "[(a=1)]", "[a b(c=1)]", "[f(a='x' b=1)]", "no call"]
)
def test_python_that_is_no_call_is_text(written: str) -> None:
    text = f"<|tool_call_start|>{written}<|tool_call_end|>"
    answer = read("lfm2", text)
    assert answer.calls == []
    assert written[1:4] in answer.text


# ---- types as the tools' schemas name them


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "int"}, "5.0", 5),
        ({"type": "INTEGER"}, "5", 5),
        ({"type": "float"}, "1.5", 1.5),
        ({"type": "bool"}, "True", True),
        ({"type": "boolean"}, "TRUE", True),
        ({"type": "dict"}, "{'a': None}", {"a": None}),
        ({"type": ["list", "None"]}, "none", None),
        ({"type": "list"}, "(1, 2)", [1, 2]),
        ({"type": "str"}, "5", "5"),
        ({"type": ["string", "null"]}, "none", "none"),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"properties": {"x": {"type": "string"}}}, "{'x': 'y'}", {"x": "y"}),
        ({"items": {"type": "string"}}, "['y']", ["y"]),
        ({"allOf": [{"$ref": "#/$defs/count"}]}, "5.0", 5),
        ({"$ref": "#/$defs/again"}, "5.0", 5),
        ({"type": "of my own"}, "5", "5"),
        ({"type": [{"x": 1}, 5]}, "5", "5"),
    ],
)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "minimax_m3", "hy_v3"])
def test_the_type_of_a_value_in_tags(name: str, schema: dict[str, Any], written: str, value: Any) -> None:
    again = {"anyOf": [{"$ref": "#/$defs/again"}, {"$ref": "#/$defs/count"}] * 10}
    defs = {"count": {"type": "integer"}, "again": again}
    schemas = {"f": {"type": "object", "properties": {"a": schema}, "$defs": defs}}
    parser = TOOL_FORMATS[name].parser(schemas)
    text = call(name, {"a": "MARK"}).replace("MARK", written)
    answer = Answer.of(joined([*parser.push(text), *parser.finish()]))
    assert answer.calls == [("f", {"a": value})]
    assert type(answer.calls[0][1]["a"]) is type(value)


@pytest.mark.parametrize("properties", [None, [], "a", {"a": None}, {"a": ["string"]}])
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "minimax_m3", "hy_v3"])
def test_properties_that_are_none(name: str, properties: Any) -> None:
    parser = TOOL_FORMATS[name].parser({"f": {"properties": properties}})
    answer = Answer.of(joined([*parser.push(call(name, {"a": "x"})), *parser.finish()]))
    assert answer.calls == [("f", {"a": "x"})]


def test_a_value_without_its_opening_tag_where_properties_are_none() -> None:
    text = call("minimax_m3", {"a": "x"}).replace("<a>", "")
    for properties in (None, 5):
        parser = TOOL_FORMATS["minimax_m3"].parser({"f": {"properties": properties}})
        assert not Answer.of(joined([*parser.push(text), *parser.finish("")])).calls
