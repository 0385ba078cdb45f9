"""Errors of schemas in the client's words: whose schema, where in it, what."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moeserve.grammar.check_process import check
from moeserve.grammar.check_protocol import Refused
from moeserve.grammar.engine import GrammarEngine
from moeserve.grammar.spec import (
    Channels,
    Ebnf,
    GrammarSpec,
    GrammarTool,
    JsonOrToolCalls,
    JsonSchema,
    TaggedArgument,
    ToolCalls,
)
from moeserve.models.sources.gguf import open_gguf
from moeserve.tokenizer.text_tokenizer import TextTokenizer
from tests.conftest import TINY_MODEL

Schema = dict[str, Any]


@pytest.fixture(scope="module")
def engine() -> GrammarEngine:
    return GrammarEngine(TextTokenizer.from_gguf(open_gguf(TINY_MODEL)))


def refusal(engine: GrammarEngine, spec: GrammarSpec) -> str:
    reply = check(engine, spec)
    assert isinstance(reply, Refused)
    return reply.message


UNIQUE: Schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
IDS: Schema = {"type": "object", "properties": {"a": {"type": "string"}, "ids": UNIQUE}, "required": ["ids"]}
CANNOT = "uniqueItems cannot be enforced"
EMPTY: Schema = {"type": "integer", "minimum": 5, "maximum": 3}
NONE = "Unsatisfiable schema: minimum (5) is greater than maximum (3)"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (UNIQUE, CANNOT),
        (IDS, f"at #/properties/ids: {CANNOT}"),
        ({"type": "array", "items": {"anyOf": [{"type": "null"}, IDS]}},
         f"at #/items/anyOf/1/properties/ids: {CANNOT}"),
        ({"properties": {"a/b": {"$ref": "#/$defs/X~Y"}}, "$defs": {"X~Y": IDS}},
         f"at #/$defs/X~0Y/properties/ids: {CANNOT}"),
        ({"properties": {"a": {"$ref": "#"}, "ids": UNIQUE}}, f"at #/properties/ids: {CANNOT}"),
        ({"properties": {"a": {"items": {"$ref": "#"}}, "ids": UNIQUE}}, f"at #/properties/ids: {CANNOT}"),
        ({"properties": {"a": {"items": {"$ref": "#"}}}} | UNIQUE, CANNOT),
        ({"properties": {"a": {"not": {}, "contains": {}}}}, "at #/properties/a: contains, not cannot be enforced"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=x)y"}}},
         "at #/properties/a: pattern: look-around, including look-ahead and look-behind, is not supported"),
        ({"properties": {"a": {"type": "text"}}}, "at #/properties/a: Invalid type: text"),
        ({"properties": {"a": {"enum": "x"}}}, "at #/properties/a: enum must be an array"),
        ({"properties": {"a": {"$ref": "#/$defs/X"}}},
         "at #/properties/a: $ref '#/$defs/X' points to nothing in the schema"),
        ({"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}},
         "at #/properties/a: oneOf: a value may match alternatives 0 and 1 at once; use anyOf, or give each a required "
         "property whose const differs"),
        ({"properties": {"a": False}, "required": ["a"]},
         "Unsatisfiable schema: required property 'a' is unsatisfiable"),
        ({"properties": {"o": EMPTY, "a": {"properties": {"n": EMPTY}, "required": ["n"]}}, "required": ["a"]},
         f"at #/properties/a/properties/n: {NONE}"),
        ({"properties": {"a": {"$ref": "#/$defs/X"}}, "$defs": {"X": EMPTY}, "required": ["a"]},
         f"at #/$defs/X: {NONE}"),
        ({"type": "array", "items": {"anyOf": [EMPTY, EMPTY]}, "minItems": 1}, f"at #/items/anyOf/0: {NONE}"),
        # A published tool's pattern of domain names with maxLength fails so, too.
        ({"properties": {"a": {"type": "string", "pattern": "^(a|b)*c.{1000}d.{1000}$", "minLength": 5000}}},
         "at #/properties/a: pattern, format and lengths of this string are too complex to be enforced together; "
         "simplify the pattern, or leave minLength and maxLength out"),
        ({"properties": {"a": {"type": "string", "pattern": "^[ab]{3}$", "maxLength": 2}}, "required": ["a"]},
         "at #/properties/a: Unsatisfiable schema: no string fits pattern, format and lengths together; correct one "
         "of them"),
        ({"allOf": [{"$ref": "#"}, {"properties": {"a": {}}}]},
         "a $ref that leads back to itself cannot be combined with keywords beside it"),
    ],
)  # fmt: skip
def test_the_place_in_a_schema(engine: GrammarEngine, schema: Schema, message: str) -> None:
    assert refusal(engine, JsonSchema(json.dumps(schema))) == message
    tools = [GrammarTool("good", '{"type": "object"}'), GrammarTool("bad one", json.dumps(schema))]
    whose = f'tool "bad one" {message}' if message.startswith("at ") else f'tool "bad one": {message}'
    assert refusal(engine, ToolCalls(tools, parallel=True)) == whose
    assert refusal(engine, JsonOrToolCalls('{"type": "integer"}', tools, parallel=True)) == whose


def test_in_every_form_of_calls(engine: GrammarEngine) -> None:
    tool = GrammarTool("f", json.dumps(IDS), [TaggedArgument("ids", True, schema=json.dumps(UNIQUE))])
    tokens = dict.fromkeys(("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>"), 5)
    for spec in (
        ToolCalls([tool], parallel=False),
        Channels(tokens, JsonSchema('{"type": "integer"}'), [tool]),
    ):
        assert refusal(engine, spec) == f'tool "f" at #/properties/ids: {CANNOT}'
    whole = refusal(engine, Channels(tokens, JsonSchema(json.dumps(IDS)), []))
    assert whole == f"at #/properties/ids: {CANNOT}"


def test_an_error_of_all_tools_together_shows_nothing_of_the_grammar(engine: GrammarEngine) -> None:
    properties = {f"property_{i}": {"type": "string", "pattern": "^[a-z]+-[0-9]+$"} for i in range(400)}
    schemas = (json.dumps({"type": "object", "properties": properties, "title": str(i)}) for i in range(20))
    spec = ToolCalls([GrammarTool(f"f{i}", schema) for i, schema in enumerate(schemas)], parallel=True)
    message = refusal(engine, spec)
    assert "too " in message
    assert "%json" not in message
    assert "tool_" not in message


def test_a_grammar_of_the_clients_own_keeps_its_lines(engine: GrammarEngine) -> None:
    message = refusal(engine, Ebnf("start: a\na: nothing"))
    assert "nothing" in message
    assert "2(" in message
