"""Schemas as clients write them: no answer invents keys, and none goes on for ever between its parts."""

from __future__ import annotations

import json
import random
import re
from typing import Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel, ConfigDict, Field

from moeserve.grammar.engine import GrammarEngine
from moeserve.grammar.spec import (
    ANY_OBJECT,
    GrammarTool,
    JsonOrToolCalls,
    JsonSchema,
    TextWithToolCalls,
    ToolCalls,
)
from moeserve.models.sources.gguf import open_gguf
from moeserve.tokenizer.text_tokenizer import TextTokenizer
from tests.conftest import TINY_MODEL
from tests.support.chats.grammar_texts import matches, written

Schema = dict[str, Any]


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.from_gguf(open_gguf(TINY_MODEL))


@pytest.fixture(scope="module")
def engine(tokenizer: TextTokenizer) -> GrammarEngine:
    return GrammarEngine(tokenizer)


INTEGER: Schema = {"type": "integer"}
TO_A: Schema = {"$ref": "#/$defs/A"}
A: Schema = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
B: Schema = {"type": "object", "properties": {"b": INTEGER}, "required": ["b"]}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (A, ['{"a": 1}'], ['{"a": 1, "b": 2}', "{}"]),
        ({"properties": {"a": INTEGER}}, ['{"a": 1}', "{}"], ['{"b": 2}', "3"]),
        ({"type": "object", "properties": {}}, ["{}"], ['{"a": 1}']),
        ({"type": "object"}, ["{}", '{"a": 1}'], ["3"]),
        (A | {"additionalProperties": True}, ['{"a": 1, "b": 2}'], ["{}"]),
        (A | {"additionalProperties": {}}, ['{"a": 1, "b": 2}'], ["{}"]),
        (A | {"additionalProperties": {"type": "null"}}, ['{"a": 1, "b": null}'], ['{"a": 1, "b": 2}']),
        (A | {"additionalProperties": False}, ['{"a": 1}'], ['{"a": 1, "b": 2}']),
        (A | {"unevaluatedProperties": False}, ['{"a": 1}'], ['{"a": 1, "b": 2}']),
        (A | {"unevaluatedProperties": {"type": "null"}}, ['{"a": 1, "b": null}'], ['{"a": 1, "b": 2}']),
        (A | {"patternProperties": {"^x": {"type": "null"}}}, ['{"a": 1, "xy": null}'], ['{"a": 1, "y": null}']),
        ({"type": "object", "patternProperties": {"^x": INTEGER}}, ['{"xy": 1}', "{}"], ['{"y": 1}']),
        # A name that is required and not described has to come.
        (A | {"required": ["a", "z"]}, ['{"a": 1, "z": [2]}'], ['{"a": 1}', '{"a": 1, "z": 2, "y": 3}']),
        (A | {"minProperties": 2}, ['{"a": 1, "b": 2}'], ['{"a": 1}']),
        ({"type": ["object", "null"], "properties": {"a": INTEGER}}, ["null", '{"a": 1}'], ['{"b": 1}']),
        # Within other schemas, and behind references.
        ({"type": "array", "items": A}, ['[{"a": 1}]'], ['[{"a": 1, "b": 2}]']),
        ({"type": "array", "prefixItems": [A], "items": False}, ['[{"a": 1}]'], ['[{"a": 1, "b": 2}]']),
        ({"type": "object", "additionalProperties": A}, ['{"x": {"a": 1}}'], ['{"x": {"a": 1, "b": 2}}']),
        ({"anyOf": [A, B, {"type": "null"}]}, ['{"a": 1}', '{"b": 1}', "null"], ['{"a": 1, "b": 1}']),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, ['{"a": 1}'], ['{"a": 1, "b": 2}']),
        ({"$ref": "#/definitions/A%20b", "definitions": {"A b": A}}, ['{"a": 1}'], ['{"a": 1, "b": 2}']),
        (A | {"properties": {"a": INTEGER, "c": {"$ref": "#/properties/a"}}},
         ['{"a": 1, "c": 2}'], ['{"a": 1, "c": ""}']),
        ({"$id": "https://x.example/s", "$ref": "s#n", "$defs": {"n": A | {"$anchor": "n"}}},
         ['{"a": 1}'], ['{"b": 1}']),
        ({"properties": {"a": INTEGER, "next": {"$ref": "#"}}},
         ['{"a": 1, "next": {"a": 2}}'], ['{"next": {"b": 1}}']),
        (TO_A | {"description": "d", "default": {}, "$defs": {"A": A}}, ['{"a": 1}'], ['{"a": 1, "b": 2}']),
        # Several schemas of one value leave room for each other's names, and for no more.
        ({"allOf": [TO_A], "title": "t", "$defs": {"A": A}}, ['{"a": 1}'], ['{"a": 1, "b": 2}']),
        ({"allOf": [A, B]}, ['{"a": 1, "b": 2}'], ['{"a": 1}', '{"a": 1, "b": 2, "c": 3}']),
        ({"allOf": [TO_A, B], "$defs": {"A": A}}, ['{"a": 1, "b": 2}'], ['{"a": 1, "b": 2, "c": 3}']),
        (A | {"anyOf": [B, {"properties": {"c": INTEGER}}]}, ['{"a": 1, "b": 2}', '{"a": 1, "c": 3}', '{"a": 1}'],
         ['{"a": 1, "b": 2, "c": 3}', '{"b": 2}']),
        ({"allOf": [{"anyOf": [A, B]}, {"anyOf": [B, {"properties": {"c": INTEGER}}]}]},
         ['{"a": 1, "b": 2}', '{"b": 2}'],
         ['{"a": 1, "d": 3}']),
        ({"type": "object", "properties": {"a": INTEGER, "b": INTEGER},
          "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
         ['{"a": 1}', '{"b": 1}', '{"a": 1, "b": 1}'], ["{}", '{"a": 1, "c": 1}']),
        ({"properties": {"a": INTEGER, "b": INTEGER}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
         ['{"a": 1}', '{"b": 1}'], ["{}", '{"a": 1, "b": 1}', '{"a": 1, "c": 1}']),
        ({"allOf": [A, {"additionalProperties": True}]}, ['{"a": 1, "c": 2}'], ["{}"]),
        ({"allOf": [A, {"patternProperties": {"^x": INTEGER}}]}, ['{"a": 1, "x": 2}'], ['{"a": 1, "c": 2}']),
        ({"allOf": [{"properties": {"o": A}}, {"properties": {"o": B}}]},
         ['{"o": {"a": 1, "b": 2}}'], ['{"o": {"a": 1}}']),
        (A | {"allOf": [{"type": "object"}], "unevaluatedProperties": False}, ['{"a": 1}'], ['{"a": 1, "c": 3}']),
        ({"allOf": [{"type": "object"}], "unevaluatedProperties": False}, ["{}"], ['{"c": 3}']),
        ({"allOf": [A, B], "unevaluatedProperties": False}, ['{"a": 1, "b": 2}'], ['{"a": 1, "b": 2, "c": 3}']),
        # The same definition, closed for two neighbours.
        ({"properties": {"x": TO_A, "y": {"allOf": [TO_A, B]}}, "$defs": {"A": A}},
         ['{"x": {"a": 1}, "y": {"a": 1, "b": 2}}'], ['{"x": {"a": 1, "b": 2}}']),
        # Dictionaries whose keys have a schema.
        ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": INTEGER},
         ['{"any": 1}'], ['{"a": ""}']),
        ({"propertyNames": TO_A, "additionalProperties": INTEGER, "$defs": {"A": {"enum": ["k", "l"]}}},
         ['{"k": 1}', '{"k": 1, "l": 2}', "{}"], ['{"m": 1}']),
        ({"type": "object", "propertyNames": {"pattern": "^k"}, "additionalProperties": INTEGER},
         ['{"kl": 1}'], ['{"m": 1}']),
        ({"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}},
         ['{"kl": 1}'], ['{"m": 1}', '{"long": 1}']),
        # Digits end.
        (INTEGER, ["-1", "0", "1" * 18], ["1" * 20]),
        ({"type": "integer", "minimum": 0}, ["1" * 18], ["-1", "1" * 20]),
        ({"type": ["integer", "null"]}, ["null", "1"], ["1" * 20]),
        ({"enum": [10**20, "x"]}, ['"x"'], ["1"]),
        # Blanks end, unless the client has its own wish.
        (A,
         ['{"a":1}', '{ "a" : 1 }', '{\n    "a": 1\n}', '{\r\n\t"a": 1}'],
         ['{  "a": 1}', '{\n\n"a": 1}', '{\n "a": 1 \n}']),
        (A | {"x-guidance": {"whitespace_flexible": False}}, ['{"a":1}'], ['{"a": 1}']),
        (A | {"x-guidance": {"whitespace_pattern": "[ ]{3}"}}, ['{"a":   1}'], ['{"a": 1}']),
    ],
)  # fmt: skip
def test_what_a_schema_allows(
    engine: GrammarEngine, tokenizer: TextTokenizer, schema: Schema, good: list[str], bad: list[str]
) -> None:
    for text in good:
        assert matches(engine, tokenizer, JsonSchema(json.dumps(schema)), text), text
    for text in bad:
        assert not matches(engine, tokenizer, JsonSchema(json.dumps(schema)), text), text


class Tag(BaseModel):
    """A tag."""

    name: Literal["new", "old"]
    weight: int = 1


class Person(BaseModel):
    """Clients send its schema as pydantic writes it: llama-index, instructor, Ollama's own library."""

    model_config = ConfigDict(title="Somebody")

    name: str = Field(description="Family name", max_length=5)
    age: int | None = Field(default=None, ge=0)
    tags: list[Tag] = Field(max_length=2)
    main: Tag
    friend: Person | None = None
    scores: dict[Literal["a", "b"], bool]


def clients_schemas() -> dict[str, Schema]:
    from openai.lib._pydantic import to_strict_json_schema  # takes a second

    pydantic = Person.model_json_schema()
    # llm's `--schema "name, age int"`
    concise = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "age": INTEGER},
        "required": ["ok", "age"],
    }
    # zod-to-json-schema (zod 3) and z.toJSONSchema (zod 4), by default closed
    zod: Schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$ref": "#/definitions/Order",
        "definitions": {
            "Order": {
                "type": "object",
                "properties": {
                    "id": {"type": "integer", "exclusiveMinimum": 0},
                    "state": {"type": ["string", "null"], "enum": ["open", None]},
                    "again": {"$ref": "#/definitions/Order/properties/state"},
                    "pair": {
                        "type": "array",
                        "minItems": 2,
                        "maxItems": 2,
                        "items": [INTEGER, {"type": "boolean"}],
                    },
                },
                "required": ["id", "state"],
                "additionalProperties": False,
            }
        },
    }
    zod4: Schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "n": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
            "map": {
                "type": "object",
                "propertyNames": {"type": "string", "enum": ["x", "y"]},
                "additionalProperties": {"type": "boolean"},
                "required": ["x", "y"],
            },
        },
        "required": ["n", "map"],
        "additionalProperties": False,
    }

    strict = to_strict_json_schema(Person)
    return {"pydantic": pydantic, "concise": concise, "zod": zod, "zod4": zod4, "strict": strict}


def _behind_reference(schema: Schema) -> Schema:
    definitions = schema.get("$defs", schema.get("definitions", {}))
    assert definitions is not None
    return definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


@pytest.mark.parametrize("client", ["pydantic", "concise", "zod", "zod4", "strict"])
def test_an_answer_has_no_keys_but_the_schemas(
    engine: GrammarEngine, tokenizer: TextTokenizer, client: str
) -> None:
    """Tokens at random, among which those that go on are no rarer than those that end something."""
    schema = clients_schemas()[client]
    names = _behind_reference(schema)["properties"].keys()
    checked = 0
    for seed in range(12):
        rng = random.Random(seed)
        output = written(engine, JsonSchema(json.dumps(schema)), rng.choice, 600)
        if output is None:  # one friend after another
            continue
        answer = json.loads(tokenizer.decode(output))
        jsonschema.validators.validator_for(schema)(schema).validate(answer)
        assert answer.keys() <= names
        checked += 1
    assert checked > 3


NUMBERS = GrammarTool(
    "f",
    json.dumps(
        {
            "type": "object",
            "properties": {"a": INTEGER, "b": {"type": "array", "items": INTEGER, "maxItems": 2}},
            "required": ["a"],
        }
    ),
)


@pytest.mark.parametrize(
    "spec",
    [
        JsonSchema(NUMBERS.schema),
        ToolCalls([NUMBERS], parallel=False),
        JsonOrToolCalls(NUMBERS.schema, [NUMBERS], parallel=False),
    ],
)
def test_whatever_is_preferred_an_answer_ends(
    engine: GrammarEngine, tokenizer: TextTokenizer, spec: JsonSchema | ToolCalls | JsonOrToolCalls
) -> None:
    """Models that have lost their way prefer line ends, blanks or digits."""
    for liked in ("\n", " ", "\t", "0", "1", "\n ", ",", '"'):

        def choose(ids: list[int], liked: str = liked) -> int:
            return max(ids, key=lambda id: (tokenizer.decode([id]).startswith(liked), -id))

        output = written(engine, spec, choose, 600)
        assert output is not None, liked
        assert "  " not in re.sub(r"\r?\n[ \t]*", " ", tokenizer.decode(output))


def test_an_object_without_names_is_open(engine: GrammarEngine, tokenizer: TextTokenizer) -> None:
    """Tools that are not strict are included, whatever their schemas say."""
    call = '<tool_call>\n{"name": "f", "arguments": {"any": [1]}}\n</tool_call>'
    assert matches(engine, tokenizer, ANY_OBJECT, '{"any": [1]}')
    assert matches(engine, tokenizer, TextWithToolCalls([GrammarTool("f", ANY_OBJECT.schema)], True), call)
