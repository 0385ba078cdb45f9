"""The request body of /generate and /generate_stream, with LightLLM's names, defaults and ranges.

Source: LightLLM's documentation and its `SamplingParams.verify`. As there, only /generate takes `n` above 1.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from moeserve.grammar import spec as grammar
from moeserve.httpserver.generation.request.fields import (
    INT32_MAX,
    INT64_MAX,
    MAX_CHOICES,
    StopString,
    TokenId,
    one_or_many,
)
from moeserve.httpserver.generation.request.grammar_fields import Grammar, Pattern, Schema
from moeserve.httpserver.generation.request.spec import GenerationSpec, GrammarConstraint
from moeserve.httpserver.transport.request_model import RequestModel, unsupported

StopTokens = Annotated[list[TokenId], Field(min_length=1, max_length=1)]


class GenerateParameters(RequestModel):
    empty: ClassVar = frozenset({"stop_sequences", "regular_constraint", "guided_grammar"})

    do_sample: Annotated[bool, Field(description="False is greedy, whatever the temperature.")] = False
    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX, description="-1 switches it off.")] = -1
    presence_penalty: Annotated[float, Field(ge=0, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=0, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=1, le=100)] = 1.0
    max_new_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] = 16
    min_new_tokens: Annotated[int, Field(ge=1, le=INT32_MAX, description="Counts the end token too.")] = 1
    ignore_eos: bool = False
    stop_sequences: Annotated[
        list[StopString | StopTokens],
        BeforeValidator(one_or_many, json_schema_input_type=str | list[str] | list[list[int]]),
        Field(max_length=16, default_factory=list, description="Strings, or lists of one token id each."),
    ]
    skip_special_tokens: bool = True
    return_details: Annotated[bool, Field(description="/generate: a list of tokens with logprobs.")] = False
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    best_of: Annotated[int | None, Field(ge=1, description="Only n is accepted.")] = None
    seed: Annotated[int | None, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] = None

    add_special_tokens: Annotated[Any, unsupported("add_special_tokens", True)] = True
    add_spaces_between_special_tokens: Annotated[Any, unsupported("another spacing", True)] = True
    print_eos_token: Annotated[Any, unsupported("print_eos_token", False)] = False
    input_penalty: Annotated[Any, unsupported("input_penalty", False)] = False
    exponential_decay_length_penalty: Annotated[
        Any, unsupported("exponential_decay_length_penalty", [1, 1.0], [1, 1])
    ] = None
    regular_constraint: Pattern | None = None
    guided_grammar: Grammar | None = None
    guided_json: Schema | None = None
    allowed_token_ids: Annotated[Any, unsupported("allowed_token_ids", [])] = None

    @model_validator(mode="after")
    def _fields_agree(self) -> GenerateParameters:
        if self.best_of is not None and self.best_of != self.n:
            raise PydanticCustomError("best_of", "best_of other than n is not supported")
        if self.min_new_tokens > self.max_new_tokens:
            raise PydanticCustomError("min_new_tokens", "min_new_tokens must be at most max_new_tokens")
        if self.top_k == 0:
            raise PydanticCustomError("top_k", "top_k must be -1 (off) or at least 1, got 0")
        if len(self.grammar_constraints()) > 1:
            names = "regular_constraint, guided_grammar and guided_json"
            raise PydanticCustomError("guided_json", "only one of {names}", {"names": names})
        return self

    def grammar_constraints(self) -> list[GrammarConstraint]:
        found: list[GrammarConstraint] = []
        if self.regular_constraint is not None:
            found.append(
                GrammarConstraint(grammar.Regex(self.regular_constraint), "parameters.regular_constraint")
            )
        if self.guided_grammar is not None:
            found.append(GrammarConstraint(grammar.Ebnf(self.guided_grammar), "parameters.guided_grammar"))
        if self.guided_json is not None:
            found.append(GrammarConstraint(grammar.JsonSchema(self.guided_json), "parameters.guided_json"))
        return found


class GenerateRequestBody(RequestModel):
    inputs: Annotated[str, Field(description="The prompt, as it is: no chat template.")]
    parameters: Annotated[GenerateParameters, Field(default_factory=GenerateParameters)]
    multimodal_params: Annotated[Any, unsupported("multimodal input", {})] = None

    def generation_spec(self, arrival: float) -> GenerationSpec:
        """Returns what the request asks the engine for. LightLLM's answers always have the chosen token's logprob, and
        LightLLM counts the end token in min_new_tokens; GenerationSpec.min_tokens counts the tokens before it."""
        parameters = self.parameters
        stops = parameters.stop_sequences
        return GenerationSpec(
            arrival=arrival,
            prompts=[self.inputs],
            prompt_param="inputs",
            n=parameters.n,
            max_tokens=parameters.max_new_tokens,
            max_tokens_param="parameters.max_new_tokens",
            grammar=next(iter(parameters.grammar_constraints()), None),
            min_tokens=parameters.min_new_tokens - 1,
            temperature=parameters.temperature if parameters.do_sample else 0.0,
            top_k=max(parameters.top_k, 0),
            top_p=parameters.top_p,
            presence_penalty=parameters.presence_penalty,
            frequency_penalty=parameters.frequency_penalty,
            repetition_penalty=parameters.repetition_penalty,
            seed=parameters.seed,
            logprobs=0,
            stop=tuple(stop for stop in stops if isinstance(stop, str)),
            stop_token_ids=tuple(stop[0] for stop in stops if isinstance(stop, list)),
            stop_token_ids_param="parameters.stop_sequences",
            skip_special_tokens=parameters.skip_special_tokens,
            ignore_eos=parameters.ignore_eos,
        )
