"""The fields that constrain the answer's form, and their translation to grammars."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from moeserve.grammar import spec as grammar
from moeserve.httpserver.generation.request.asked import GrammarConstraint
from moeserve.httpserver.generation.request.grammar_fields import (
    MAX_PATTERN_CHARS,
    STRICT,
    Grammar,
    Pattern,
    Schema,
)
from moeserve.httpserver.transport.request_model import (
    Advisory,
    JsonSchemaDict,
    Label,
    RequestModel,
    unsupported,
)

MAX_OPTIONS: Final = 1024
_OWN_USE: Final = Advisory("For the client's own use.")


def _none_empty(options: list[str]) -> list[str]:
    if not all(options):
        raise PydanticCustomError("choice", "every choice needs at least one character")
    return options


Choices = Annotated[
    list[Annotated[str, Field(max_length=MAX_PATTERN_CHARS)]],
    AfterValidator(_none_empty),
    Field(min_length=1, max_length=MAX_OPTIONS),
]


class JsonSchemaFormat(RequestModel):
    name: Annotated[Label | None, _OWN_USE] = None
    description: Annotated[str | None, _OWN_USE] = None
    schema_: Annotated[JsonSchemaDict, Field(alias="schema")]
    strict: Annotated[bool, STRICT] = False


class ResponseFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: Annotated[
        JsonSchemaDict | None,
        Field(
            alias="schema",
            description="May be given with either JSON type, as llama-server's clients send it.",
        ),
    ] = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> ResponseFormat:
        if self.schema_ is not None:
            if self.type == "text" or self.json_schema is not None:
                raise PydanticCustomError(
                    "schema", "requires type json_object or json_schema, without the field json_schema"
                )
        elif (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError(
                "json_schema", "is required with type json_schema, and allowed only with it"
            )
        return self

    def grammar_spec(self) -> grammar.GrammarSpec | None:
        if self.schema_ is not None:
            return grammar.JsonSchema(json.dumps(self.schema_))
        if self.json_schema is not None:
            return grammar.JsonSchema(json.dumps(self.json_schema.schema_))
        return grammar.ANY_OBJECT if self.type == "json_object" else None


class StructuredOutputs(RequestModel):
    """The newer form of vLLM's `guided_` fields: an object with exactly one of these fields."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Grammar | None = None
    json_object: bool | None = None

    disable_fallback: Annotated[Any, unsupported("disable_fallback (there is no fallback)", False, True)] = (
        False
    )
    disable_any_whitespace: Annotated[Any, unsupported("disable_any_whitespace", False)] = False
    disable_additional_properties: Annotated[Any, unsupported("disable_additional_properties", False)] = False
    whitespace_pattern: Annotated[Any, unsupported("whitespace_pattern")] = None
    structural_tag: Annotated[Any, unsupported("structural_tag")] = None


_EMPTY_IS_NONE: Final = BeforeValidator(lambda value: None if value == "" else value)


class StructuredFields(RequestModel):
    """OpenAI's `response_format` and the corresponding fields of vLLM, SGLang and llama-server. A request may have one
    of these fields. Empty values count as not given, except that an empty schema is a schema and an empty choice is an
    error."""

    empty: ClassVar = frozenset(
        {
            *("response_format", "structured_outputs", "guided_regex", "guided_grammar"),
            *("regex", "ebnf", "grammar"),
        }
    )

    response_format: ResponseFormat | None = None
    guided_json: Annotated[Schema | None, _EMPTY_IS_NONE] = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: Annotated[Pattern | None, Field(description="SGLang's name for guided_regex.")] = None
    ebnf: Annotated[Grammar | None, Field(description="SGLang's name for guided_grammar.")] = None
    json_schema: Annotated[
        Schema | None, _EMPTY_IS_NONE, Field(description="SGLang's and llama-server's name for guided_json.")
    ] = None
    grammar: Annotated[Grammar | None, Field(description="llama-server's name for guided_grammar.")] = None

    guided_decoding_backend: Annotated[Any, unsupported("another backend", "auto", "guidance")] = None
    guided_whitespace_pattern: Annotated[Any, unsupported("guided_whitespace_pattern")] = None

    @model_validator(mode="after")
    def _at_most_one_form(self) -> StructuredFields:
        constraints = self.grammar_constraints
        if len(constraints) > 1:
            names = " and ".join(constraint.param for constraint in constraints)
            raise PydanticCustomError(
                constraints[1].param.split(".")[0], "only one of {names} is allowed", {"names": names}
            )
        return self

    @property
    def grammar_constraint(self) -> GrammarConstraint | None:
        return next(iter(self.grammar_constraints), None)

    @cached_property
    def grammar_constraints(self) -> list[GrammarConstraint]:
        format = self.response_format
        new = self.structured_outputs or StructuredOutputs()
        specs: dict[str, grammar.GrammarSpec | None] = {
            "response_format": None if format is None else format.grammar_spec(),
            "guided_json": None if self.guided_json is None else grammar.JsonSchema(self.guided_json),
            "guided_regex": None if self.guided_regex is None else grammar.Regex(self.guided_regex),
            "guided_choice": None if self.guided_choice is None else grammar.Choice(self.guided_choice),
            "guided_grammar": None if self.guided_grammar is None else grammar.Ebnf(self.guided_grammar),
            "regex": None if self.regex is None else grammar.Regex(self.regex),
            "ebnf": None if self.ebnf is None else grammar.Ebnf(self.ebnf),
            "json_schema": None if self.json_schema is None else grammar.JsonSchema(self.json_schema),
            "grammar": None if self.grammar is None else grammar.Ebnf(self.grammar),
            "structured_outputs.json": None if new.json_ is None else grammar.JsonSchema(new.json_),
            "structured_outputs.regex": None if new.regex is None else grammar.Regex(new.regex),
            "structured_outputs.choice": None if new.choice is None else grammar.Choice(new.choice),
            "structured_outputs.grammar": None if new.grammar is None else grammar.Ebnf(new.grammar),
            "structured_outputs.json_object": grammar.ANY_OBJECT if new.json_object else None,
        }
        lenient = {"json_schema"}
        if format is not None and not (format.json_schema is not None and format.json_schema.strict):
            lenient.add("response_format")
        return [
            GrammarConstraint(spec, param, is_lenient=param in lenient)
            for param, spec in specs.items()
            if spec is not None
        ]
