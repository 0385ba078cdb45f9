"""The request bodies and answers of /tokenize and /detokenize, which serve clients of vLLM and of llama-server."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from moeserve.httpserver.generation.chat.chat_messages import Messages, TemplateKwargs
from moeserve.httpserver.generation.chat.chat_tools import Tools
from moeserve.httpserver.generation.request.fields import ModelName, TokenId
from moeserve.httpserver.transport.request_model import RequestModel, UnsupportedField

MAX_IDS = 1 << 22

AdapterName = Annotated[str, Field(min_length=1, max_length=200)]


class TokenizeRequest(RequestModel):
    """A body with exactly one of `prompt`, `messages` and `content` (llama-server's name for a prompt)."""

    unsupported_fields: ClassVar = {
        "chat_template": UnsupportedField((), "the flag --chat-template"),
        "continue_final_message": UnsupportedField((False,)),
        "mm_processor_kwargs": UnsupportedField(({},)),
        "parse_special": UnsupportedField((True,)),
        "reasoning_effort": UnsupportedField(),
        "tool_choice": UnsupportedField(("auto",)),
    }

    model: ModelName | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: Annotated[
        bool | None,
        Field(description="The vocabulary's begin token. Default: true for a prompt, false for messages."),
    ] = None
    tools: Annotated[Tools, Field(default_factory=list, description="For messages.")]
    add_generation_prompt: Annotated[bool, Field(description="For messages.")] = True
    chat_template_kwargs: Annotated[TemplateKwargs, Field(default_factory=dict)]
    return_token_strs: bool = False
    content: Annotated[str | None, Field(description="A text, as llama-server's clients send it.")] = None
    add_special: Annotated[bool, Field(description="For content: the vocabulary's begin token.")] = False
    with_pieces: Annotated[bool, Field(description="Each token comes with its text (llama-server).")] = False

    @model_validator(mode="after")
    def _one_of_three(self) -> TokenizeRequest:
        if [self.prompt, self.messages, self.content].count(None) != 2:
            raise PydanticCustomError("prompt", "give one of prompt, messages and content")
        if self.tools and self.messages is None:
            raise PydanticCustomError("tools", "are only allowed with messages")
        return self


class TokenPiece(TypedDict):
    id: int
    piece: str | list[int]  # the text; a list of bytes if they are not whole characters


class TokenizeResponse(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int] | list[TokenPiece]
    token_strs: list[str] | None


class DetokenizeRequest(RequestModel):
    unsupported_fields: ClassVar = {"skip_special_tokens": UnsupportedField((False,))}

    model: ModelName | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_IDS)]


class LoadAdapterRequest(RequestModel):
    unsupported_fields: ClassVar = {
        "is_3d_lora_weight": UnsupportedField((False,)),
        "pinned": UnsupportedField((False,)),
    }

    lora_name: AdapterName
    base_model_name: Annotated[
        str | None,
        Field(
            max_length=200,
            description="A name of the served model that the adapter belongs to. Default: with several models, the one "
            "that the adapter's own configuration names.",
        ),
    ] = None
    lora_path: Annotated[
        str,
        Field(min_length=1, max_length=4096, description="In the folder of --lora-dir, or relative to it."),
    ]
    load_inplace: Annotated[
        bool,
        Field(
            description="Replaces the adapter of this name; its running requests continue with the replaced one."
        ),
    ] = False


class UnloadAdapterRequest(RequestModel):
    unsupported_fields: ClassVar = {"lora_int_id": UnsupportedField()}

    lora_name: AdapterName


class DetokenizeResponse(TypedDict):
    """The text, under vLLM's field name and under llama-server's."""

    prompt: str
    content: str
