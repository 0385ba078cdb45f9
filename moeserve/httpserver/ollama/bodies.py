"""The request bodies of /api/chat, /api/generate and /api/show.

Source: Ollama's API reference and its Python client's types.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from moeserve.grammar import spec as grammar
from moeserve.httpserver.generation.chat.chat_tools import CallArgumentsObject, Tools, tool_use
from moeserve.httpserver.generation.request.asked import (
    Asked,
    ChatPrompt,
    FimPrompt,
    GrammarConstraint,
    PlainPrompts,
)
from moeserve.httpserver.generation.request.attachments import pictures_in
from moeserve.httpserver.generation.request.caller import Caller
from moeserve.httpserver.generation.request.fields import (
    INT32_MAX,
    INT64_MAX,
    MAX_MESSAGES,
    MAX_TOP_LOGPROBS,
    ManyStopStrings,
    ModelName,
)
from moeserve.httpserver.generation.request.pictures import (
    Picture,
    joined,
    picture_of_base64,
    picture_of_url,
)
from moeserve.httpserver.generation.request.sampling_fields import OllamaSampling
from moeserve.httpserver.generation.request.thinking import ThinkingOptions, thinking_options
from moeserve.httpserver.generation.request.tool_use import ToolUse
from moeserve.httpserver.transport.request_model import (
    NO_EFFECT,
    JsonSchemaDict,
    Label,
    RequestModel,
    UnsupportedField,
    unsupported,
)
from moeserve.messages.pictures import MOST_PICTURES

Images = Annotated[list[str], Field(max_length=MOST_PICTURES, description="Pictures in base64.")]
_PLAIN_NAME: Final = re.compile(r"[\w./@:-]{1,512}", re.ASCII)
_LATEST: Final = ":latest"  # the tag that Ollama's clients add to a name without one
_HOSTS: Final = ("hf.co/", "huggingface.co/")  # hosts that Ollama's clients put before names of the Hub


class Options(OllamaSampling):
    """The sampling parameters. Options about the loading of a model have no effect."""

    takes_whole_floats: ClassVar = True
    idle: ClassVar = frozenset(
        {
            *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "numa", "use_mmap"),
            *("use_mlock", "low_vram", "f16_kv", "vocab_only", "logits_all", "penalize_newline"),
            *("mirostat_tau", "mirostat_eta", "repeat_last_n"),
        }
    )
    unsupported_fields: ClassVar = {
        "mirostat": UnsupportedField((0,)),
        "tfs_z": UnsupportedField((1,)),
        "typical_p": UnsupportedField((1,)),
    }

    num_predict: Annotated[
        int | None,
        Field(
            ge=-2,
            le=INT32_MAX,
            description="Default, 0, -1, -2 and more than fits: the rest of the context.",
        ),
    ] = None
    seed: Annotated[int | None, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] = None
    stop: Annotated[ManyStopStrings, Field(default_factory=list)]


class CalledFunction(RequestModel):
    name: Annotated[str, Field(max_length=1024)]
    arguments: CallArgumentsObject = Field(default_factory=dict)
    index: Annotated[int | None, NO_EFFECT] = None


class ToolCall(RequestModel):
    id: Label | None = None
    type: Annotated[Label | None, NO_EFFECT] = None
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"type": "function", "function": function} | ({"id": self.id} if self.id else {})


def _picture(image: str) -> Picture:
    """Reads a picture in base64. Some clients that know OpenAI's form send a URL instead, which is read too."""
    is_address = image[:8].lower().startswith(("http://", "https://"))
    return picture_of_url(image) if is_address else picture_of_base64(image)


def _pictures(images: list[str]) -> list[Picture]:
    try:
        return [_picture(image) for image in images]
    except PydanticCustomError as error:
        raise PydanticCustomError("images", "images: {problem}", {"problem": error.message()}) from error


class Message(RequestModel):
    empty: ClassVar = frozenset({"images", "tool_calls", "tool_name", "tool_call_id"})

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: Annotated[Images, Field(default_factory=list)]
    tool_calls: Annotated[list[ToolCall], Field(max_length=1024, default_factory=list)]
    tool_name: Annotated[Label | None, Field(description="Whose result a tool's message is.")] = None
    tool_call_id: Label | None = None

    @model_validator(mode="after")
    def _images_are_pictures(self) -> Message:
        if self.pictures and self.role not in ("user", "tool"):
            raise PydanticCustomError(
                "images",
                "messages of the role {role} cannot have images; send them in a message of role user",
                {"role": self.role},
            )
        return self

    @cached_property
    def pictures(self) -> list[Picture]:
        return _pictures(self.images)

    def for_template(self) -> dict[str, Any]:
        content = joined([*(picture.mark for picture in self.pictures), self.content])
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.thinking:
            message["reasoning_content"] = self.thinking
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_name:
            message["name"] = self.tool_name
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        return message


class _Body(RequestModel):
    empty: ClassVar = frozenset({"format", "options", "think", "tools", "images", "context"})

    model: ModelName
    stream: bool = True
    format: Annotated[
        Literal["json", ""] | JsonSchemaDict | None, Field(description='"json", or a JSON Schema.')
    ] = None
    options: Annotated[Options, Field(default_factory=Options)]
    think: Annotated[
        bool | Literal["low", "medium", "high", "max"] | None,
        Field(description="Default: as the model does."),
    ] = None
    logprobs: bool = False
    top_logprobs: Annotated[
        int, Field(ge=0, le=MAX_TOP_LOGPROBS, description="Alternatives of each token, with logprobs.")
    ] = 0
    keep_alive: Annotated[Any, NO_EFFECT] = None

    def shared_asked(self, caller: Caller, prompt: ChatPrompt | PlainPrompts) -> Asked:
        options = self.options
        predict = options.num_predict
        return Asked(
            caller=caller,
            prompt=prompt,
            model=served_name(self.model),
            max_tokens=predict if predict is not None and predict > 0 else None,
            max_tokens_param="options.num_predict",
            ends_with_context=True,
            grammar=self.grammar_constraint,
            sampler=options.sampler_settings(),
            seed=options.seed,
            logprobs=self.top_logprobs if self.logprobs else None,
            stop=tuple(options.stop),
            chosen=options.chosen_settings(),
        )

    @cached_property
    def thinking(self) -> ThinkingOptions:
        if isinstance(self.think, bool):
            return ThinkingOptions(is_enabled=self.think, param="think")
        return thinking_options(self.think, None, {}, "think")

    @cached_property
    def grammar_constraint(self) -> GrammarConstraint | None:
        if not self.format:
            return None
        if self.format == "json":
            return GrammarConstraint(grammar.ANY_OBJECT, "format")
        return GrammarConstraint(grammar.JsonSchema(json.dumps(self.format)), "format", is_lenient=True)


class ChatBody(_Body):
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES, default_factory=list)]
    tools: Annotated[Tools, Field(default_factory=list)]

    @model_validator(mode="after")
    def _tools_make_sense(self) -> ChatBody:
        _ = self.tool_use  # raises if its fields contradict each other
        return self

    @cached_property
    def tool_use(self) -> ToolUse:
        return tool_use([definition.tool() for definition in self.tools], "auto", True)

    @property
    def only_loads(self) -> bool:
        """True for a request without messages: Ollama then only loads the model, and the answer is empty."""
        return not self.messages

    def asked(self, caller: Caller) -> Asked:
        messages = [message.for_template() for message in self.messages]
        pictures = pictures_in(self.messages)
        prompt = ChatPrompt(messages, pictures, tools=self.tool_use, thinking=self.thinking)
        return replace(self.shared_asked(caller, prompt), prompt_param="messages")


class GenerateBody(_Body):
    prompt: str = ""
    system: str = ""
    raw: Annotated[bool, Field(description="The prompt as it is: no chat template.")] = False
    suffix: Annotated[
        str, Field(description="The text after the answer, for models that fill in the middle.")
    ] = ""
    images: Annotated[Images, Field(default_factory=list)]
    template: Annotated[Any, unsupported("a template of the request's", "")] = None
    context: Annotated[Any, unsupported("context (use /api/chat)", [])] = None

    @model_validator(mode="after")
    def _images_are_pictures(self) -> GenerateBody:
        if self.pictures and self.raw:
            raise PydanticCustomError("images", "cannot be combined with raw")
        if self.suffix and (self.pictures or self.system):
            raise PydanticCustomError("suffix", "cannot be combined with images or system")
        return self

    @cached_property
    def pictures(self) -> list[Picture]:
        return _pictures(self.images)

    @property
    def only_loads(self) -> bool:
        return not self.prompt and not self.images and not self.suffix

    def asked(self, caller: Caller) -> Asked:
        if self.suffix:
            return self.shared_asked(caller, [FimPrompt(self.prompt, self.suffix)])
        if self.raw:
            return self.shared_asked(caller, [self.prompt])
        head = [{"role": "system", "content": self.system}] if self.system else []
        content = joined([*(picture.mark for picture in self.pictures), self.prompt])
        messages = [*head, {"role": "user", "content": content}]
        return self.shared_asked(caller, ChatPrompt(messages, self.pictures, thinking=self.thinking))


class ShowBody(RequestModel):
    model: ModelName | None = None
    name: Annotated[ModelName | None, Field(description="An older name of `model`.")] = None
    verbose: Annotated[bool, NO_EFFECT] = False

    @model_validator(mode="after")
    def _names_a_model(self) -> ShowBody:
        if (self.model or self.name) is None:
            raise PydanticCustomError("model", "this field is required")
        return self


class _HubBody(RequestModel):
    model: ModelName | None = None
    name: Annotated[ModelName | None, Field(description="An older name of `model`.")] = None
    insecure: Annotated[Any, NO_EFFECT] = None

    @model_validator(mode="after")
    def _names_one(self) -> _HubBody:
        if not _PLAIN_NAME.fullmatch(self.named):
            raise PydanticCustomError(
                "model", "must be a name of the Hugging Face Hub: org/repo or org/repo:Q4_K_M"
            )
        return self

    @property
    def named(self) -> str:
        return self.model or self.name or ""


class PullBody(_HubBody):
    stream: bool = True
    username: Annotated[Any, NO_EFFECT] = None
    password: Annotated[Any, NO_EFFECT] = None


class DeleteBody(_HubBody):
    pass


def served_name(name: str) -> str:
    """Returns the served model's name for the names that Ollama's clients send: hf.co/org/repo:Q4_K_M, or
    name:latest."""
    for host in _HOSTS:
        name = name.removeprefix(host)
    return name.removesuffix(_LATEST)
