"""The request body of /generate and /generate_stream, with LightLLM's names, defaults and ranges.

Source: LightLLM's documentation and its `SamplingParams.verify`. As in LightLLM, only /generate takes `n` above 1.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, ClassVar

from msgspec.structs import replace
from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from moeserve.grammar import spec as grammar
from moeserve.httpserver.generation.request.asked import Asked, GrammarConstraint
from moeserve.httpserver.generation.request.caller import Caller
from moeserve.httpserver.generation.request.fields import (
    INT32_MAX,
    INT64_MAX,
    MAX_CHOICES,
    StopString,
    TokenId,
    one_or_many,
)
from moeserve.httpserver.generation.request.grammar_fields import Grammar, Pattern, Schema
from moeserve.httpserver.generation.request.sampling_fields import LightLLMSampling
from moeserve.httpserver.transport.request_model import RequestModel, unsupported

StopTokens = Annotated[list[TokenId], Field(min_length=1, max_length=1)]


class GenerateParameters(LightLLMSampling):
    empty: ClassVar = frozenset({"stop_sequences", "regular_constraint", "guided_grammar"})

    do_sample: Annotated[bool, Field(description="False is greedy, whatever the temperature.")] = False
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

    @field_validator("top_k", check_fields=False)
    @classmethod
    def _top_k_is_off_or_some(cls, value: int) -> int:
        if value == 0:
            raise PydanticCustomError("top_k", "top_k must be -1 (off) or at least 1, got 0")
        return value

    @model_validator(mode="after")
    def _fields_agree(self) -> GenerateParameters:
        if self.best_of is not None and self.best_of != self.n:
            raise PydanticCustomError("best_of", "best_of other than n is not supported")
        if self.min_new_tokens > self.max_new_tokens:
            raise PydanticCustomError("min_new_tokens", "min_new_tokens must be at most max_new_tokens")
        if len(self.grammar_constraints) > 1:
            names = "regular_constraint, guided_grammar and guided_json"
            raise PydanticCustomError("guided_json", "only one of {names} is allowed", {"names": names})
        return self

    @cached_property
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

    def asked(self, caller: Caller) -> Asked:
        """Returns the body as an `Asked`, the form that all APIs share. LightLLM's answers always have the chosen
        token's log-probability. LightLLM counts the end token in min_new_tokens; `Asked.min_tokens` does not."""
        parameters = self.parameters
        stops = parameters.stop_sequences
        settings = parameters.sampler_settings()
        return Asked(
            caller=caller,
            prompt=[self.inputs],
            prompt_param="inputs",
            n=parameters.n,
            max_tokens=parameters.max_new_tokens,
            max_tokens_param="parameters.max_new_tokens",
            grammar=next(iter(parameters.grammar_constraints), None),
            min_tokens=parameters.min_new_tokens - 1,
            sampler=settings if parameters.do_sample else replace(settings, temperature=0.0),
            seed=parameters.seed,
            logprobs=0,
            stop=tuple(stop for stop in stops if isinstance(stop, str)),
            stop_token_ids=tuple(stop[0] for stop in stops if isinstance(stop, list)),
            stop_token_ids_param="parameters.stop_sequences",
            skip_special_tokens=parameters.skip_special_tokens,
            ignore_eos=parameters.ignore_eos,
        )
