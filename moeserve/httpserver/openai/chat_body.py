"""The request body of /v1/chat/completions."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from moeserve.httpserver.generation.chat.chat_messages import Messages, TemplateKwargs
from moeserve.httpserver.generation.chat.chat_tools import (
    MAX_TOOLS,
    CustomToolDefinition,
    FunctionDefinition,
    FunctionName,
    ToolChoice,
    Tools,
    chat_tool_use,
    tool_of,
    tool_use,
)
from moeserve.httpserver.generation.request.asked import Asked, ChatPrompt
from moeserve.httpserver.generation.request.attachments import pdfs_in, pictures_in
from moeserve.httpserver.generation.request.caller import Caller
from moeserve.httpserver.generation.request.fields import INT32_MAX, MAX_TOP_LOGPROBS
from moeserve.httpserver.generation.request.thinking import (
    BUDGETS,
    Effort,
    ThinkingOptions,
    switched,
    thinking_options,
)
from moeserve.httpserver.generation.request.tool_use import ToolUse
from moeserve.httpserver.openai import other_servers
from moeserve.httpserver.openai.shared_body import OpenAIRequest
from moeserve.httpserver.transport.request_model import NO_EFFECT, FreeDict, Label, RequestModel, unsupported


class ReasoningOptions(RequestModel):
    """OpenRouter's object with the reasoning fields."""

    takes_whole_floats: ClassVar = True
    effort: Effort | None = None
    max_tokens: Annotated[int | None, Field(ge=0, le=INT32_MAX, description="thinking_token_budget.")] = None
    enabled: Annotated[bool, Field(description="False: the effort none.")] = True
    exclude: Annotated[bool, Field(description="True leaves the reasoning out of the answer.")] = False


class ThinkingSwitch(RequestModel):
    """The object with which clients of DeepSeek, GLM and Kimi switch reasoning."""

    takes_whole_floats: ClassVar = True
    type: Annotated[
        Literal["enabled", "disabled", "adaptive", "auto"],
        Field(description="adaptive, auto: the template decides."),
    ]
    budget_tokens: Annotated[int | None, Field(ge=0, le=INT32_MAX, description="thinking_token_budget.")] = (
        None
    )
    clear_thinking: Annotated[Any, NO_EFFECT] = None  # the template decides what it shows of older turns


class ChatCompletionRequest(OpenAIRequest):
    unsupported_fields: ClassVar = other_servers.CHAT
    idle: ClassVar = other_servers.CHAT_IDLE
    empty: ClassVar = OpenAIRequest.empty | {
        *("chat_template_kwargs", "tools", "tool_choice", "functions", "function_call", "modalities"),
        *("reasoning", "reasoning_effort", "audio", "prediction", "prompt_cache_options", "thinking"),
    }

    messages: Messages
    max_tokens: Annotated[
        int | None, Field(ge=-1, le=INT32_MAX, description="Default, and -1: the rest of the context.")
    ] = None
    max_completion_tokens: Annotated[int | None, Field(ge=-1, le=INT32_MAX)] = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    chat_template_kwargs: Annotated[TemplateKwargs, Field(default_factory=dict)]
    add_generation_prompt: bool = True
    continue_final_message: Annotated[
        bool,
        Field(
            description="Continue the last message, which must be an assistant's text, instead of beginning "
            "an answer (vLLM)."
        ),
    ] = False

    tools: Annotated[Tools, Field(default_factory=list)]
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Annotated[bool, Field(description="False: at most one call.")] = True
    functions: Annotated[
        list[FunctionDefinition],
        Field(
            max_length=MAX_TOOLS,
            default_factory=list,
            description="The older form of tools. The answer then has `function_call`, which is one call.",
        ),
    ]
    function_call: Annotated[
        Literal["none", "auto"] | FunctionName | None, Field(description="The older form of tool_choice.")
    ] = None
    reasoning_effort: Annotated[
        Effort | None, Field(description=f"Most reasoning tokens: {BUDGETS}; higher efforts set no bound.")
    ] = None
    thinking_token_budget: Annotated[
        int | None,
        Field(
            ge=-1,
            le=INT32_MAX,
            description="Maximum number of reasoning tokens; 0 switches reasoning off, -1 sets no bound.",
        ),
    ] = None
    reasoning: ReasoningOptions | None = None
    thinking_switch: Annotated[ThinkingSwitch | None, Field(alias="thinking")] = None
    enable_thinking: Annotated[
        bool | None, Field(description="Switches reasoning on or off, as it does in chat_template_kwargs.")
    ] = None
    include_reasoning: Annotated[bool, Field(description="False leaves the reasoning out of the answer.")] = (
        True
    )
    separate_reasoning: Annotated[
        bool, Field(description="False leaves the reasoning in `content`, with its tags (SGLang).")
    ] = True

    audio: Annotated[Any, unsupported("audio")] = None
    modalities: Annotated[Any, unsupported("an output other than text", ["text"])] = None
    web_search_options: Annotated[Any, unsupported("web search")] = None
    moderation: Annotated[Any, unsupported("moderation")] = None

    store: Annotated[bool, NO_EFFECT] = False
    service_tier: Annotated[Label | None, NO_EFFECT] = None
    prediction: Annotated[FreeDict | None, NO_EFFECT] = None
    prompt_cache_key: Annotated[Label | None, NO_EFFECT] = None
    prompt_cache_retention: Annotated[Label | None, NO_EFFECT] = None
    prompt_cache_options: Annotated[FreeDict | None, NO_EFFECT] = None
    safety_identifier: Annotated[Label | None, NO_EFFECT] = None

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "is only allowed with logprobs true")
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(self, name) == 0:
                raise PydanticCustomError(name, "must be -1 or at least 1, got 0")
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            raise PydanticCustomError("max_tokens", "contradicts max_completion_tokens")
        if self.continue_final_message:
            if "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt:
                raise PydanticCustomError("continue_final_message", "requires add_generation_prompt false")
            last = self.messages[-1]
            if last.role != "assistant" or last.calls or not last.content:
                raise PydanticCustomError(
                    "continue_final_message",
                    "requires a last message of role assistant, with text and without tool calls",
                )
        _ = self.tool_use, self.thinking  # raises if the fields contradict each other
        return self

    @cached_property
    def tool_use(self) -> ToolUse:
        if self.functions or isinstance(self.function_call, FunctionName):
            return self._function_use()
        tools = [definition.tool() for definition in self.tools]
        return chat_tool_use(tools, self.tool_choice, self.parallel_tool_calls)

    def _function_use(self) -> ToolUse:
        if self.tools:
            raise PydanticCustomError("functions", "cannot be combined with tools")
        tools, choice = [tool_of(function) for function in self.functions], self.function_call
        params = ("functions", "function_call")
        if isinstance(choice, FunctionName):
            return tool_use(tools, None, False, name=choice.name, params=params)
        return tool_use(tools, choice, False, params=params)

    @cached_property
    def custom_tools(self) -> frozenset[str]:
        """Returns the names of the tools that take free text."""
        return frozenset(tool.custom.name for tool in self.tools if isinstance(tool, CustomToolDefinition))

    @cached_property
    def thinking(self) -> ThinkingOptions:
        effort, budget, switch = self.reasoning_effort, self.thinking_token_budget, self.thinking_switch
        if self.reasoning is not None:
            if effort is not None or budget is not None:
                message = "cannot be combined with reasoning_effort or thinking_token_budget"
                raise PydanticCustomError("reasoning", message)
            effort = self.reasoning.effort if self.reasoning.enabled else "none"
            budget = self.reasoning.max_tokens if self.reasoning.enabled else None
        if switch is not None and switch.type != "disabled" and budget is None:
            budget = switch.budget_tokens
        options = thinking_options(effort, None if budget == -1 else budget, self.chat_template_kwargs)
        modes = {"enabled": True, "disabled": False}
        options = switched(options, None if switch is None else modes.get(switch.type), "thinking")
        return switched(options, self.enable_thinking, "enable_thinking")

    def chat_prompt(self) -> ChatPrompt:
        return ChatPrompt(
            messages=[message.for_template() for message in self.messages],
            pictures=pictures_in(self.messages),
            pdfs=pdfs_in(self.messages),
            tools=self.tool_use,
            thinking=self.thinking,
            template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt and not self.continue_final_message,
            continue_final_message=self.continue_final_message,
            show_reasoning=self.include_reasoning and not (self.reasoning and self.reasoning.exclude),
            separate_reasoning=self.separate_reasoning,
        )

    def asked(self, caller: Caller) -> Asked:
        """Translates the body to the engine's request."""
        is_newer = self.max_completion_tokens is not None
        max_tokens = self.max_completion_tokens if is_newer else self.max_tokens
        return replace(
            self.shared_asked(caller, self.chat_prompt()),
            prompt_param="messages",
            logprobs=self.top_logprobs if self.logprobs else None,
            max_tokens=None if max_tokens == -1 else max_tokens,
            max_tokens_param="max_completion_tokens" if is_newer else "max_tokens",
        )
