"""The request bodies of /v1/responses.

Source: OpenAI's API reference (Responses) and its Python client's types.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, Literal, get_args

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from moeserve.grammar import spec as grammar
from moeserve.httpserver.generation.chat.chat_messages import TemplateKwargs
from moeserve.httpserver.generation.chat.chat_tools import MAX_TOOLS, ToolMode, tool_use
from moeserve.httpserver.generation.request.asked import Asked, ChatPrompt, GrammarConstraint
from moeserve.httpserver.generation.request.attachments import pdfs_in, pictures_in
from moeserve.httpserver.generation.request.caller import Caller
from moeserve.httpserver.generation.request.fields import (
    INT32_MAX,
    INT64_MAX,
    MAX_MESSAGES,
    MAX_TOP_LOGPROBS,
    CacheSalt,
    ModelName,
    StopStrings,
)
from moeserve.httpserver.generation.request.foreign_history import without_unknown_types
from moeserve.httpserver.generation.request.grammar_fields import STRICT
from moeserve.httpserver.generation.request.sampling_fields import ResponsesSampling
from moeserve.httpserver.generation.request.thinking import Effort, ThinkingOptions, thinking_options
from moeserve.httpserver.generation.request.tool_use import ToolUse
from moeserve.httpserver.responses.items import KNOWN_TYPES, Item, messages_of
from moeserve.httpserver.responses.tools import AllowedTools, ResponseTools, Toolbox, ToolReference
from moeserve.httpserver.transport.request_model import (
    NO_EFFECT,
    Advisory,
    FreeDict,
    JsonSchemaDict,
    Label,
    RequestModel,
    UnsupportedField,
    unsupported,
)
from moeserve.httpserver.transport.unknown_fields import FOREIGN_ITEM, drop_unknown

_OWN_USE: Final = Advisory("For the client's own use.")
MAX_PARTS: Final = 64  # entries of `include`
ResponseId = Annotated[str, Field(pattern=r"^resp_[\x21-\x7e]{1,160}$")]


class TextFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Annotated[Label | None, _OWN_USE] = None
    description: Annotated[str | None, _OWN_USE] = None
    schema_: Annotated[JsonSchemaDict | None, Field(alias="schema")] = None
    strict: Annotated[bool, STRICT] = False

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise PydanticCustomError("schema", "is required with type json_schema, and allowed only with it")
        return self


class TextConfig(RequestModel):
    idle: ClassVar = frozenset({"verbosity"})

    format: TextFormat = TextFormat()


_WHOLE_REASONING: Final = Advisory("Has no effect: the reasoning comes whole.")


class ReasoningConfig(RequestModel):
    effort: Effort | None = None
    summary: Annotated[Label | None, _WHOLE_REASONING] = None
    generate_summary: Annotated[Label | None, _WHOLE_REASONING] = None
    context: Annotated[
        Literal["auto", "current_turn", "all_turns"] | None,
        Advisory("Has no effect: the chat template decides of which turns the model sees the reasoning."),
    ] = None
    mode: Annotated[Any, unsupported("another mode", "standard")] = None


class ResponseStreamOptions(RequestModel):
    include_obfuscation: Annotated[bool, NO_EFFECT] = False


Include = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    # Dropped: parts of images and of hosted tools, which no answer has.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]


def _with_known_parts(include: Any, info: ValidationInfo) -> Any:
    """Leaves out unknown parts of `include`, which newer clients send. No answer has these parts."""
    if not isinstance(include, list) or len(include) > MAX_PARTS:
        return include
    known = get_args(Include)
    unknown = [part for part in include if isinstance(part, str) and part not in known]
    return (
        [part for part in include if part not in unknown]
        if drop_unknown(info, "include=", unknown)
        else include
    )


# Items that bring tools: Codex's, and those that a search of tools has found.
_TOOL_ITEMS: Final = ("additional_tools", "tool_search_output")


def _to_items(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    return without_unknown_types(value, KNOWN_TYPES, FOREIGN_ITEM, info)


# Fields of vLLM and SGLang, and of OpenAI's chat API, that would change the answer and are not supported.
_UNSUPPORTED: Final[Mapping[str, UnsupportedField]] = {
    "enable_response_messages": UnsupportedField((False,)),
    "extra_key": UnsupportedField((), "cache_salt"),
    "frequency_penalty": UnsupportedField((0,)),
    "ignore_eos": UnsupportedField((False,)),
    "include_stop_str_in_output": UnsupportedField((False,)),
    "logit_bias": UnsupportedField(),
    "max_completion_tokens": UnsupportedField((), "max_output_tokens"),
    "max_tokens": UnsupportedField((), "max_output_tokens"),
    "messages": UnsupportedField((), "input"),
    "min_p": UnsupportedField((0,)),
    "mm_processor_kwargs": UnsupportedField(),
    "ngram_corpus_id": UnsupportedField(),
    "presence_penalty": UnsupportedField((0,)),
    "previous_input_messages": UnsupportedField((), "previous_response_id"),
    "previous_response": UnsupportedField((), "previous_response_id"),
    "priority": UnsupportedField((0,)),
    "reasoning_effort": UnsupportedField((), "reasoning.effort"),
    "repetition_penalty": UnsupportedField((1,)),
    "response_format": UnsupportedField(({"type": "text"},), "text.format"),
    "skip_special_tokens": UnsupportedField((True,)),
    "structured_outputs": UnsupportedField((), "text.format"),
    "vllm_xargs": UnsupportedField(),
}


class InputTokensRequest(RequestModel):
    """The fields that determine the prompt, which both endpoints take."""

    unsupported_fields: ClassVar = _UNSUPPORTED
    idle: ClassVar = frozenset({"request_id", "session_id"})
    empty: ClassVar = frozenset(
        {
            *("previous_response_id", "conversation", "tools", "tool_choice", "reasoning", "text"),
            "chat_template_kwargs",
        }
    )

    model: ModelName | None = None
    input: Annotated[
        list[Item],
        BeforeValidator(_to_items, json_schema_input_type=str | list[Item]),
        Field(min_length=1, max_length=MAX_MESSAGES, description="A text of the user, or items."),
    ]
    instructions: Annotated[
        str | None, Field(description="The system message. Instructions of earlier responses do not apply.")
    ] = None
    previous_response_id: ResponseId | None = None
    tools: Annotated[ResponseTools, Field(default_factory=list)]
    tool_choice: ToolMode | Annotated[ToolReference | AllowedTools, Field(discriminator="type")] = "auto"
    parallel_tool_calls: Annotated[bool, Field(description="False: at most one call.")] = True
    reasoning: ReasoningConfig = ReasoningConfig()
    text: TextConfig = TextConfig()
    chat_template_kwargs: Annotated[TemplateKwargs, Field(default_factory=dict)]
    truncation: Annotated[
        Literal["auto", "disabled"],
        Field(description="A prompt that is too long is refused, even with auto."),
    ] = "disabled"
    conversation: Annotated[Any, unsupported("conversation (use previous_response_id)")] = None

    @model_validator(mode="before")
    @classmethod
    def _tools_of_items(cls, body: Any) -> Any:
        """Adds the tools that items bring to the request's tools."""
        items = body.get("input") if isinstance(body, dict) else None
        if not isinstance(items, list):
            return body
        bringing = [item for item in items if isinstance(item, dict) and item.get("type") in _TOOL_ITEMS]
        if not bringing:
            return body
        tools = list(body.get("tools") or ())
        for item in bringing:
            for tool in item.get("tools") or ():
                if len(tools) > MAX_TOOLS or tool not in tools:
                    tools.append(tool)
        return body | {"tools": tools, "input": [item for item in items if item not in bringing]}

    @model_validator(mode="after")
    def _fields_agree(self) -> InputTokensRequest:
        _ = self.tool_use  # raises if the fields contradict each other
        return self

    @cached_property
    def toolbox(self) -> Toolbox:
        return Toolbox(self.tools)

    @cached_property
    def tool_use(self) -> ToolUse:
        toolbox, choice = self.toolbox, self.tool_choice
        match choice:
            case ToolReference():
                (name,) = toolbox.referenced([choice])
                return tool_use(toolbox.tools, None, self.parallel_tool_calls, name=name)
            case AllowedTools(mode=mode, tools=references):
                allowed = toolbox.referenced(references)
                return tool_use(toolbox.tools, mode, self.parallel_tool_calls, allowed=allowed)
        return tool_use(toolbox.tools, choice, self.parallel_tool_calls)

    @cached_property
    def thinking(self) -> ThinkingOptions:
        return thinking_options(self.reasoning.effort, None, self.chat_template_kwargs, "reasoning.effort")

    @cached_property
    def grammar_constraint(self) -> GrammarConstraint | None:
        format = self.text.format
        if format.schema_ is not None:
            schema = grammar.JsonSchema(json.dumps(format.schema_))
            return GrammarConstraint(schema, "text.format.schema", is_lenient=not format.strict)
        return GrammarConstraint(grammar.ANY_OBJECT, "text.format") if format.type == "json_object" else None

    def asked(self, caller: Caller, items: list[Item]) -> Asked:
        """Returns the request to the engine. items: the items of the whole conversation."""
        return Asked(
            caller=caller,
            model=self.model,
            prompt=ChatPrompt(
                messages=messages_of(self.instructions, items, self.toolbox),
                pictures=pictures_in(items),
                pdfs=pdfs_in(items),
                tools=self.tool_use,
                thinking=self.thinking,
                template_kwargs=self.chat_template_kwargs,
            ),
            prompt_param="input",
            grammar=self.grammar_constraint,
        )


class ResponsesRequest(InputTokensRequest, ResponsesSampling):
    empty: ClassVar = InputTokensRequest.empty | {
        *("stream_options", "stop", "include", "cache_salt", "metadata", "user", "client_metadata"),
        *("prompt", "prompt_cache_options", "context_management"),
    }

    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    store: Annotated[bool, Field(description="Keep the response for previous_response_id and GET.")] = True
    background: Annotated[
        bool,
        Field(
            description="Answers at once and makes the response in the background; GET returns it. Needs store."
        ),
    ] = False
    max_output_tokens: Annotated[
        int | None, Field(ge=1, le=INT32_MAX, description="Default: the rest of the context.")
    ] = None
    seed: Annotated[int | None, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] = None
    stop: Annotated[StopStrings, Field(default_factory=list)]
    top_logprobs: Annotated[
        int,
        Field(
            ge=0,
            le=MAX_TOP_LOGPROBS,
            description="Alternatives for each token. Above 0 implies include message.output_text.logprobs.",
        ),
    ] = 0
    truncate_prompt_tokens: Annotated[
        int | None,
        Field(
            ge=-1,
            le=INT32_MAX,
            description="Only the prompt's last tokens are read; -1: as many as fit (vLLM).",
        ),
    ] = None
    include: Annotated[
        list[Include], BeforeValidator(_with_known_parts), Field(max_length=MAX_PARTS, default_factory=list)
    ]

    cache_salt: CacheSalt = ""

    metadata: Annotated[FreeDict, Field(description="Comes back as it is.", default_factory=dict)]
    user: Annotated[Label | None, NO_EFFECT] = None
    safety_identifier: Annotated[Label | None, NO_EFFECT] = None
    prompt_cache_key: Annotated[Label | None, NO_EFFECT] = None
    prompt_cache_retention: Annotated[Label | None, NO_EFFECT] = None
    prompt_cache_options: Annotated[FreeDict | None, NO_EFFECT] = None
    service_tier: Annotated[Label | None, NO_EFFECT] = None
    client_metadata: Annotated[FreeDict | None, NO_EFFECT] = None

    prompt: Annotated[Any, unsupported("prompt (stored templates)")] = None
    max_tool_calls: Annotated[int | None, NO_EFFECT, Field(ge=1, le=INT32_MAX)] = None
    context_management: Annotated[Any, unsupported("context_management", [])] = None
    moderation: Annotated[Any, unsupported("moderation")] = None
    access_programs: Annotated[Any, unsupported("access_programs")] = None
    image: Annotated[Any, unsupported("image")] = None

    @model_validator(mode="after")
    def _truncates_to_something(self) -> ResponsesRequest:
        if self.truncate_prompt_tokens == 0:
            raise PydanticCustomError("truncate_prompt_tokens", "must be -1 or at least 1, got 0")
        return self

    @model_validator(mode="after")
    def _stores_what_is_made_in_the_background(self) -> ResponsesRequest:
        if self.background and not self.store:
            raise PydanticCustomError("background", "needs store true: the response is read by GET")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs > 0 or "message.output_text.logprobs" in self.include

    @property
    def wants_encrypted_reasoning(self) -> bool:
        return "reasoning.encrypted_content" in self.include

    def asked(self, caller: Caller, items: list[Item]) -> Asked:
        return replace(
            super().asked(caller, items),
            sampler=self.sampler_settings(),
            chosen=self.chosen_settings(),
            seed=self.seed,
            stop=tuple(self.stop),
            logprobs=self.top_logprobs if self.wants_logprobs else None,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            max_tokens=self.max_output_tokens,
            max_tokens_param="max_output_tokens",
            cache_salt=self.cache_salt,
        )
