"""Keywords that restrict nothing, and alternatives of which exactly one must hold."""

from __future__ import annotations

import json
import random
import re
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel, Field, RootModel, TypeAdapter

from moeserve.grammar.engine import GrammarEngine
from moeserve.grammar.errors import GrammarError
from moeserve.grammar.json_schema.keywords import FORMATS
from moeserve.grammar.spec import JsonSchema
from moeserve.grammar.translate import to_grammar
from moeserve.models.sources.gguf import open_gguf
from moeserve.tokenizer.text_tokenizer import TextTokenizer
from tests.conftest import TINY_MODEL
from tests.support.chats.grammar_texts import allowed, matches, written

Schema = dict[str, Any]


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.from_gguf(open_gguf(TINY_MODEL))


@pytest.fixture(scope="module")
def engine(tokenizer: TextTokenizer) -> GrammarEngine:
    return GrammarEngine(tokenizer)


def compiles(engine: GrammarEngine, schema: Schema) -> bool:
    """Raises GrammarError where it does not."""
    return bool(allowed(engine, engine.matcher(to_grammar(JsonSchema(json.dumps(schema))))))


def test_formats_that_are_enforced_are_those_that_llguidance_knows(engine: GrammarEngine) -> None:
    def knows(name: str) -> bool:
        text = json.dumps({"grammars": [{"json_schema": {"type": "string", "format": name}}]})
        try:
            return bool(engine.matcher(text))
        except GrammarError:
            return False

    registered = {
        *(
            "date-time",
            "date",
            "time",
            "duration",
            "email",
            "idn-email",
            "hostname",
            "idn-hostname",
            "ipv4",
            "ipv6",
        ),
        *("uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer"),
        *("relative-json-pointer", "regex"),
    }
    assert {name for name in registered if knows(name)} == FORMATS


@pytest.mark.parametrize(
    "name", ["password", "byte", "uri-reference", "regex", "base64", "phone", "int32", ""]
)
def test_an_unknown_format_is_an_annotation(
    engine: GrammarEngine, tokenizer: TextTokenizer, name: str
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": name, "maxLength": 8}}}
    assert matches(engine, tokenizer, JsonSchema(json.dumps(schema)), '{"a": "any"}')
    assert not matches(engine, tokenizer, JsonSchema(json.dumps(schema)), '{"a": "too long a"}')
    assert compiles(engine, {"format": name})


@pytest.mark.parametrize("value", [None, 7, ["date"], {}])
def test_a_format_that_is_no_name_is_an_annotation(engine: GrammarEngine, value: object) -> None:
    assert compiles(engine, {"type": "object", "properties": {"a": {"type": "string", "format": value}}})


@pytest.mark.parametrize("end", [r"\d*$", r"\d{0,2}0*$", r"\d{0,0}0*$"])
def test_pydantics_decimals_as_strings(engine: GrammarEngine, tokenizer: TextTokenizer, end: str) -> None:
    """Its pattern has a look-ahead, with which the whole schema was refused."""
    pattern = r"^(?!^[-+.]*$)[+-]?0*\d*\.?" + end
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": pattern}},
        "required": ["a"],
    }
    for text in (
        "",
        ".",
        "-",
        "+.",
        "7",
        "-7.",
        "007",
        "1.5",
        ".5",
        ".500",
        "1.50",
        "1.555",
        ".0",
        "1..2",
        "x",
    ):
        taken = matches(engine, tokenizer, JsonSchema(json.dumps(schema)), json.dumps({"a": text}))
        assert taken == bool(re.search(pattern, text)), text


@pytest.mark.parametrize(
    "keywords",
    [
        {"$schema": "https://json-schema.org/draft-07/schema"},
        {"$schema": "http://json-schema.org/schema#"},
        {"$schema": 7},
        {"uniqueItems": False},
        {"minContains": 2},
        {"then": False},
        {"if": {"type": "null"}},
        {"not": False},
        {"propertyNames": {"type": "string"}},
        {"propertyNames": True},
        {"dependentRequired": {}},
        {"unevaluatedItems": True},
        {"$dynamicAnchor": "here"},
        {"discriminator": {"propertyName": "a"}, "nullable": True, "x-order": 3, "deprecated": True},
    ],
)
def test_keywords_that_restrict_nothing_are_passed_over(
    engine: GrammarEngine, tokenizer: TextTokenizer, keywords: Schema
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]} | keywords
    assert matches(engine, tokenizer, JsonSchema(json.dumps(schema)), '{"a": true}')
    assert not matches(engine, tokenizer, JsonSchema(json.dumps(schema)), "{}")


@pytest.mark.parametrize(
    "keywords",
    [
        {"uniqueItems": True},
        {"not": {"type": "null"}},
        {"if": {"type": "null"}, "then": False},
        {"contains": {"type": "null"}},
        {"propertyNames": {"not": {"const": "a"}}},
        {"dependentRequired": {"a": ["b"]}},
        {"unevaluatedItems": False},
    ],
)
def test_keywords_that_restrict_something_are_not(engine: GrammarEngine, keywords: Schema) -> None:
    with pytest.raises(GrammarError, match=next(iter(keywords))):
        compiles(engine, {"type": ["object", "array"], "properties": {"a": {"type": "boolean"}}} | keywords)


class Number(BaseModel):
    kind: Literal["number"]
    value: int


class Sum(BaseModel):
    kind: Literal["sum", "difference"]
    terms: list[Annotated[Number | Sum | Negation, Field(discriminator="kind")]] = Field(max_length=2)


class Negation(BaseModel):
    kind: Literal["negation"] = "negation"  # pydantic does not list it as required
    of: Expression


class Expression(RootModel[Annotated[Number | Sum | Negation, Field(discriminator="kind")]]):
    pass


def test_recursive_discriminated_unions(engine: GrammarEngine, tokenizer: TextTokenizer) -> None:
    schema = Expression.model_json_schema()
    assert "oneOf" in json.dumps(schema)
    good = [
        {"kind": "number", "value": 3},
        {"kind": "sum", "terms": [{"kind": "number", "value": 3}, {"kind": "sum", "terms": []}]},
        {"kind": "negation", "of": {"kind": "difference", "terms": []}},
    ]
    for answer in good:
        Expression.model_validate(answer)
        assert matches(engine, tokenizer, JsonSchema(json.dumps(schema)), json.dumps(answer))
    bad = [
        '{"kind": "number", "terms": []}',
        '{"kind": "sum", "terms": [3]}',
        '{"kind": "sum"}',
        '{"value": 3}',
    ]
    for text in bad:
        assert not matches(engine, tokenizer, JsonSchema(json.dumps(schema)), text), text


def test_answers_at_random_are_of_one_alternative(engine: GrammarEngine, tokenizer: TextTokenizer) -> None:
    schema = TypeAdapter(list[Expression]).json_schema() | {"maxItems": 2}
    checked = 0
    for seed in range(20):
        output = written(engine, JsonSchema(json.dumps(schema)), random.Random(seed).choice, 300)
        if output is not None:
            jsonschema.Draft202012Validator(schema).validate(json.loads(tokenizer.decode(output)))
            checked += 1
    assert checked > 5


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    name: str = Field(max_length=3)


class Dog(Cat):
    kind: Literal["dog"] = "dog"  # type: ignore[assignment]


def test_a_tag_has_to_be_there(engine: GrammarEngine, tokenizer: TextTokenizer) -> None:
    """Pydantic reads no answer without it, and does not list it as required where it has a default."""
    schema = TypeAdapter(Annotated[Cat | Dog, Field(discriminator="kind")]).json_schema()
    assert all("kind" not in one["required"] for one in schema["$defs"].values())
    for text, is_good in (('{"kind": "dog", "name": "x"}', True), ('{"name": "x"}', False)):
        assert matches(engine, tokenizer, JsonSchema(json.dumps(schema)), text) == is_good
        # Beside a schema of the same definition that needs no tag.
        both = {
            "properties": {"pet": schema, "cat": {"$ref": "#/$defs/Cat"}},
            "$defs": schema.pop("$defs", None),
        }
        assert matches(engine, tokenizer, JsonSchema(json.dumps(both)), f'{{"pet": {text}}}') == is_good
        assert matches(engine, tokenizer, JsonSchema(json.dumps(both)), '{"cat": {"name": "x"}}')
        schema["$defs"] = both["$defs"]


def thing(kind: object, **properties: object) -> Schema:
    return {"type": "object", "properties": {"kind": kind, **properties}, "required": ["kind"]}


def needs(name: str, *others: str) -> Schema:
    return {
        "type": "object",
        "properties": {one: {"type": "boolean"} for one in (name, *others)},
        "required": [name],
    }


DISTINCT: list[list[Any]] = [
    [{"type": "string"}, {"type": "null"}],
    [{"type": "integer"}, {"type": ["string", "boolean"]}],
    [{"const": "a"}, {"const": "b"}, {"type": "integer"}],
    [{"enum": ["a", 1]}, {"enum": ["b", 2]}],
    [{"enum": ["a", 1]}, {"type": "array"}],
    [thing({"const": "a"}), thing({"const": "b"})],
    [thing({"enum": ["a", "b"]}), thing({"enum": ["c"]}), thing({"type": "null"})],
    [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
    [{"$ref": "#/$defs/A"}, thing({"const": "b"})],
    [{"$ref": "#/$defs/A"}, {"oneOf": [{"$ref": "#/$defs/B"}, {"type": "null"}]}],
    [{"allOf": [{"$ref": "#/$defs/A"}]}, {"anyOf": [{"$ref": "#/$defs/B"}, {"type": "null"}]}],
    [thing(thing({"const": "a"})), thing(thing({"const": "b"}))],
    [{"type": "object", "properties": {"kind": {"const": "a"}}}, thing({"const": "b"})],
    [needs("a"), needs("b")],
    [needs("a", "c"), needs("b", "c")],
    [{"type": "string"}],
    [False, {"type": "string"}],
]
OVERLAPPING: list[list[Any]] = [
    [{"type": "integer"}, {"type": "number"}],
    [{"type": "string"}, {"type": "string", "maxLength": 3}],
    [{"type": "string"}, {"const": "a"}],
    [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}],
    [thing({"const": "a"}), thing({"type": "string"})],
    [{"properties": {"kind": {"const": "a"}}}, {"properties": {"kind": {"const": "b"}}}],
    [needs("a"), needs("b", "a")],
    [needs("a") | {"additionalProperties": True}, needs("b")],
    [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/A"}],
    [{}, {"type": "null"}],
]  # fmt: skip
DEFINITIONS = {"A": thing({"const": "a"}, more={"$ref": "#/$defs/B"}), "B": thing({"const": "b"})}


@pytest.mark.parametrize("alternatives", DISTINCT)
def test_alternatives_that_exclude_each_other(engine: GrammarEngine, alternatives: list[Any]) -> None:
    assert compiles(engine, {"oneOf": alternatives, "$defs": DEFINITIONS})
    assert compiles(engine, {"oneOf": alternatives, "anyOf": [{}], "title": "t", "$defs": DEFINITIONS})


@pytest.mark.parametrize("alternatives", OVERLAPPING)
def test_alternatives_that_may_hold_at_once_are_refused(
    engine: GrammarEngine, alternatives: list[Any]
) -> None:
    with pytest.raises(
        GrammarError, match="oneOf: a value may match alternatives 0 and 1 at once; use anyOf"
    ):
        compiles(engine, {"oneOf": alternatives, "$defs": DEFINITIONS})
    assert compiles(
        engine, {"oneOf": alternatives, "$defs": DEFINITIONS, "x-guidance": {"coerce_one_of": True}}
    )
