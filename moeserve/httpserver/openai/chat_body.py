"""The request of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from moeserve.httpserver.generation.chat_formats import Thought
from moeserve.httpserver.generation.chat_tools import ToolCallMessage, ToolChoice, Tools, tool_use
from moeserve.httpserver.generation.thinking import BUDGETS, Effort, thought_of
from moeserve.httpserver.generation.tool_use import ToolUse
from moeserve.httpserver.openai.shared_body import OpenAIRequest
from moeserve.httpserver.transport.request_model import (
    INT32_MAX,
    NO_EFFECT,
    FreeDict,
    Label,
    RequestModel,
    unsupported,
)
from moeserve.tokenizer.renderer import RESERVED

MAX_MESSAGES: Final = 16384
MAX_TOP_LOGPROBS: Final = 20
# Fields of a text part that clients send along, as other APIs have them: what is cached is not theirs to say here, and
# an answer's own annotations come back.
WITHOUT_EFFECT: Final = frozenset({"cache_control", "prompt_cache_breakpoint", "annotations"})


def _parts_to_text(content: Any) -> Any:
    """Text parts become one string, joined by newlines as vLLM does: the templates we serve take strings."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            raise PydanticCustomError(
                "content_part",
                "a part of the type {kind} is not supported, only texts are: {form}",
                {"form": '{"type": "text", "text": "..."}', "kind": repr(kind)[:80]},
            )
        given = {name for name, value in part.items() if value is not None}
        if unknown := given - {"type", kind} - WITHOUT_EFFECT:
            raise PydanticCustomError(
                "content_part", "a text part has no field {name}", {"name": repr(min(unknown))[:80]}
            )
        texts.append(part[kind])
    return "\n".join(texts)


def _no_reserved_names(kwargs: dict[str, Any]) -> dict[str, Any]:
    taken = sorted(RESERVED & kwargs.keys())
    if taken:
        raise PydanticCustomError("reserved", "may not set {names}", {"names": ", ".join(taken)})
    return kwargs


class Message(RequestModel):
    """One message of the conversation. The thoughts of earlier turns go to the template too, which keeps
    what the model is to see again. A developer message is rendered as a system message, its older name: templates
    that do not know the role would drop it without a word."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, AfterValidator(_parts_to_text), Field(description="A string or text parts.")] = (
        None
    )
    name: Label | None = None
    tool_calls: Annotated[list[ToolCallMessage], Field(max_length=1024, default_factory=list)]
    tool_call_id: Label | None = None
    reasoning_content: str | None = None
    reasoning: Annotated[str | None, Field(description="Another name for reasoning_content.")] = None

    refusal: Annotated[str | None, NO_EFFECT] = None
    annotations: Annotated[Any, unsupported("annotations", [])] = None
    audio: Annotated[Any, unsupported("audio")] = None
    function_call: Annotated[Any, unsupported("function_call (use tool_calls)")] = None

    @model_validator(mode="after")
    def _content_is_text(self) -> Message:
        if self.content is None:
            if self.role != "assistant":
                raise PydanticCustomError(
                    "content", "content is required for the role {role}", {"role": self.role}
                )
        elif not isinstance(self.content, str):
            raise PydanticCustomError("content", "content must be a string or a list of text parts")
        return self

    def for_template(self) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content if self.content is not None else "",
        }
        for name in ("name", "tool_call_id"):
            if value := getattr(self, name):
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if thought := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = thought
        return message


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
TemplateKwargs = Annotated[
    FreeDict,
    AfterValidator(_no_reserved_names),
    Field(description='Variables for the chat template, such as {"enable_thinking": false}.'),
]


class ChatCompletionRequest(OpenAIRequest):
    messages: Messages
    max_tokens: Annotated[
        int | None, Field(ge=1, le=INT32_MAX, description="Default: the rest of the context.")
    ] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1, le=INT32_MAX)] = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    chat_template_kwargs: Annotated[TemplateKwargs, Field(default_factory=dict)]
    add_generation_prompt: bool = True

    tools: Annotated[Tools, Field(default_factory=list)]
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Annotated[bool, Field(description="False: at most one call.")] = True
    reasoning_effort: Annotated[
        Effort | None, Field(description=f"Tokens of thought: {BUDGETS}; above, as many as it takes.")
    ] = None
    thinking_token_budget: Annotated[
        int | None,
        Field(
            ge=-1, le=INT32_MAX, description="Tokens of thought; 0 switches thinking off, -1 sets no bound."
        ),
    ] = None
    include_reasoning: Annotated[bool, Field(description="False leaves the thought out of the answer.")] = (
        True
    )

    functions: Annotated[Any, unsupported("functions (use tools)", [])] = None
    function_call: Annotated[Any, unsupported("function_call (use tool_choice)", "none", "auto")] = None
    audio: Annotated[Any, unsupported("audio")] = None
    modalities: Annotated[Any, unsupported("an output other than text", ["text"])] = None
    verbosity: Annotated[Any, unsupported("verbosity")] = None
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
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            raise PydanticCustomError("max_tokens", "disagrees with max_completion_tokens")
        self.tool_use()
        self.thought()
        return self

    def tool_use(self) -> ToolUse:
        tools = [definition.tool() for definition in self.tools]
        return tool_use(tools, self.tool_choice, self.parallel_tool_calls)

    def thought(self) -> Thought:
        budget = None if self.thinking_token_budget == -1 else self.thinking_token_budget
        return thought_of(self.reasoning_effort, budget, self.chat_template_kwargs)

    def asked_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
