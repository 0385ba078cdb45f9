"""The request bodies of /v1/messages.

Source: Anthropic's API reference (Messages, version 2023-06-01) and its Python client's types.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from moeserve.grammar import spec as grammar
from moeserve.httpserver.anthropic.client_tools import as_functions
from moeserve.httpserver.anthropic.content import CACHED, Block, TextBlock, Texts, text_of
from moeserve.httpserver.anthropic.context_edits import ContextManagement
from moeserve.httpserver.anthropic.messages import AnyMessage, AssistantMessage
from moeserve.httpserver.generation.chat.chat_tools import (
    MAX_TOOLS,
    Description,
    Parameters,
    ToolName,
    without_hosted,
)
from moeserve.httpserver.generation.request.asked import Asked, ChatPrompt, GrammarConstraint
from moeserve.httpserver.generation.request.attachments import pdfs_in, pictures_in
from moeserve.httpserver.generation.request.caller import Caller
from moeserve.httpserver.generation.request.fields import INT32_MAX, MAX_MESSAGES, ModelName, StopString
from moeserve.httpserver.generation.request.sampling_fields import AnthropicSampling
from moeserve.httpserver.generation.request.thinking import BUDGETS, ThinkingOptions
from moeserve.httpserver.generation.request.tool_use import Tool, ToolUse
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


def _without_billing(blocks: list[TextBlock]) -> list[TextBlock]:
    if not blocks or (line := _BILLING.match(blocks[0].text)) is None:
        return blocks
    rest = blocks[0].text[line.end() :]
    return [*([TextBlock(type="text", text=rest)] if rest else []), *blocks[1:]]


class MessageTool(Block):
    type: Annotated[Literal["custom"], Field(description="Tools that the client runs.")] = "custom"
    name: ToolName
    description: Description | None = None
    input_schema: Parameters
    strict: Annotated[bool, Field(description="Input validates by construction.")] = False
    eager_input_streaming: Annotated[bool, NO_EFFECT] = True
    input_examples: Annotated[
        list[FreeDict], Field(max_length=64, default_factory=list, description="Part of the description.")
    ]
    defer_loading: Annotated[bool, Advisory("Has no effect: all tools are in the prompt.")] = False
    allowed_callers: Annotated[Any, unsupported("other callers", ["direct"])] = None

    def tool(self) -> Tool:
        described = self.description
        if self.input_examples:
            examples = [json.dumps(example, ensure_ascii=False) for example in self.input_examples]
            described = "\n".join([*([described] if described else []), "Examples of its input:", *examples])
        return Tool(self.name, described, {"type": "object"} | self.input_schema, self.strict)


# The types of tools that are read; OpenAI's is refused with an explanation. Others run at Anthropic.
_KNOWN_TOOLS: Final = ("custom", "function")


class MessageToolChoice(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _name_of_a_tool(self) -> MessageToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError("name", "is required with type tool, and allowed only with it")
        return self


class ThinkingConfig(RequestModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int | None, Field(ge=1, le=INT32_MAX)] = None
    display: Annotated[
        Label | None,
        Field(
            description='"omitted" leaves the reasoning out of the answer. Anything else, such as "summarized", '
            "shows all of it."
        ),
    ] = None

    @model_validator(mode="after")
    def _budget_where_it_belongs(self) -> ThinkingConfig:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise PydanticCustomError(
                "budget_tokens", "is required with type enabled, and allowed only with it"
            )
        return self


class OutputFormat(RequestModel):
    type: Literal["json_schema"]
    schema_: Annotated[JsonSchemaDict, Field(alias="schema")]


class OutputConfig(RequestModel):
    effort: Annotated[
        Literal["low", "medium", "high", "xhigh", "max"] | None,
        Field(description="With thinking enabled: sets its token budget, as reasoning_effort does."),
    ] = None
    format: OutputFormat | None = None


# On this error Anthropic's clients send the whole conversation with each request instead.
_NO_THREADS: Final = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
# Claude Code's first system block. It changes from request to request and would leave nothing of the prompt cached.
_BILLING: Final = re.compile(r"(x-anthropic-billing-header:[^\n]*(\n|$))+")


class CountTokensRequest(RequestModel):
    """The fields that determine the prompt, which both endpoints take."""

    unsupported_fields: ClassVar = {
        "chat_template_kwargs": UnsupportedField(),
        "kv_transfer_params": UnsupportedField(),
        "thread": UnsupportedField((False,), details=_NO_THREADS, empty_asks=True),
    }
    empty: ClassVar = frozenset(
        {
            *("system", "tools", "tool_choice", "thinking", "output_config", "output_format", "mcp_servers"),
            *("container", "context_management", "cache_control"),
        }
    )

    model: ModelName
    messages: Annotated[
        list[AnyMessage],
        Field(min_length=1, max_length=MAX_MESSAGES),
    ]
    system: Annotated[Texts, Field(default_factory=list)]
    tools: Annotated[
        list[MessageTool],
        BeforeValidator(partial(without_hosted, known=_KNOWN_TOOLS)),
        BeforeValidator(as_functions),
        Field(
            max_length=MAX_TOOLS,
            default_factory=list,
            description="Those of other types, which run at Anthropic, are left out; `bash_…`, `text_editor_…` and "
            "`memory_…` are functions with the parameters that their calls have.",
        ),
    ]
    tool_choice: MessageToolChoice | None = None
    thinking: Annotated[
        ThinkingConfig | None, Field(description="Left out or disabled: the answer has no reasoning.")
    ] = None
    output_config: OutputConfig | None = None
    output_format: Annotated[
        OutputFormat | None, Field(description="The older name of output_config.format.")
    ] = None
    context_management: ContextManagement | None = None

    mcp_servers: Annotated[Any, unsupported("mcp_servers", [])] = None
    container: Annotated[Any, unsupported("container")] = None
    cache_control: Annotated[FreeDict | None, CACHED] = None

    @model_validator(mode="after")
    def _conversation_makes_sense(self) -> CountTokensRequest:
        last = self.messages[-1]
        if isinstance(last, AssistantMessage) and not (
            last.content and isinstance(last.content[-1], TextBlock)
        ):
            message = "must end with a message of the user, or with text of the assistant's to go on from"
            raise PydanticCustomError("messages", message)
        newer = None if self.output_config is None else self.output_config.format
        if newer is not None and self.output_format is not None and newer != self.output_format:
            raise PydanticCustomError("output_format", "contradicts output_config.format")
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise PydanticCustomError("tools", "every tool needs a name of its own")
        choice = self.tool_choice
        if choice is not None and choice.type in ("any", "tool"):
            if not self.tools:
                raise PydanticCustomError("tool_choice", "needs tools")
            if choice.name is not None and choice.name not in names:
                message = "there is no tool {name}"
                raise PydanticCustomError("tool_choice", message, {"name": repr(choice.name)})
        return self

    @property
    def is_begun(self) -> bool:
        """True if the last message is the assistant's: the beginning of an answer that the model continues."""
        return isinstance(self.messages[-1], AssistantMessage)

    def for_template(self) -> list[dict[str, Any]]:
        system = text_of(_without_billing(self.system))
        head = [{"role": "system", "content": system}] if system else []
        return head + [one for message in self.messages for one in message.for_template()]

    @cached_property
    def tool_use(self) -> ToolUse:
        choice = self.tool_choice or MessageToolChoice(type="auto")
        modes: Final = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}
        mode: Any = modes[choice.type]
        tools = tuple(tool.tool() for tool in self.tools)
        return ToolUse(tools, mode, choice.name or "", not choice.disable_parallel_tool_use)

    @cached_property
    def thinking_options(self) -> ThinkingOptions:
        """Anthropic's models think only on request."""
        config = self.thinking
        if config is None:
            return ThinkingOptions(is_enabled=False)
        match config.type:
            case "disabled":
                return ThinkingOptions(is_enabled=False, budget=0)
            case "enabled":
                return ThinkingOptions(True, config.budget_tokens, "thinking.budget_tokens")
            case "adaptive":
                effort = self.output_config.effort if self.output_config else None
                budget = None if effort is None else BUDGETS.get(effort)
                return ThinkingOptions(True, budget, "output_config.effort", effort)

    @cached_property
    def grammar_constraint(self) -> GrammarConstraint | None:
        newer = None if self.output_config is None else self.output_config.format
        chosen = newer or self.output_format
        if chosen is None:
            return None
        param = "output_format" if newer is None else "output_config.format"
        return GrammarConstraint(grammar.JsonSchema(json.dumps(chosen.schema_)), param)

    def asked(self, caller: Caller) -> Asked:
        """Translates the body to the engine's request."""
        return Asked(
            caller=caller,
            model=self.model,
            prompt=ChatPrompt(
                messages=self.for_template(),
                pictures=pictures_in(self.messages),
                pdfs=pdfs_in(self.messages),
                tools=self.tool_use,
                thinking=self.thinking_options,
                add_generation_prompt=not self.is_begun,
                continue_final_message=self.is_begun,
                show_reasoning=self.thinking is None or self.thinking.display != "omitted",
            ),
            prompt_param="messages",
            grammar=self.grammar_constraint,
        )


class MessagesRequest(CountTokensRequest, AnthropicSampling):
    empty: ClassVar = CountTokensRequest.empty | {"stop_sequences", "metadata", "service_tier"}

    max_tokens: Annotated[
        int,
        Field(
            ge=0,
            le=INT32_MAX,
            description="An upper bound: the answer also ends where the context ends. 0 computes the prompt's KV "
            "for later requests, and answers nothing.",
        ),
    ]
    stop_sequences: Annotated[list[StopString], Field(max_length=16, default_factory=list)]
    stream: bool = False

    metadata: Annotated[FreeDict | None, NO_EFFECT] = None
    service_tier: Annotated[Literal["auto", "standard_only"] | None, NO_EFFECT] = None
    inference_geo: Annotated[Label | None, NO_EFFECT] = None

    @model_validator(mode="after")
    def _reasoning_leaves_room(self) -> MessagesRequest:
        budget = self.thinking.budget_tokens if self.thinking else None
        if budget is not None and 0 < self.max_tokens <= budget:
            raise PydanticCustomError("thinking", "budget_tokens must be less than max_tokens")
        return self

    def asked(self, caller: Caller) -> Asked:
        return replace(
            super().asked(caller),
            default_max_tokens=self.max_tokens,  # an upper bound: these clients ask for more than the context has
            stop=tuple(self.stop_sequences),
            sampler=self.sampler_settings(),
            chosen=self.chosen_settings(),
        )
