"""The items of /v1/responses, and their translation to the messages of a chat template.

Source: OpenAI's API reference (Responses) and its Python client's types. Items keep the API's own form, in the store
too, so the same code reads a stored conversation and one that a client sends.
"""

from __future__ import annotations

import base64
import binascii
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, model_validator

from moeserve.chatformat.json_text import to_json
from moeserve.httpserver.generation.chat.chat_tools import CallArgumentsText, arguments_for_template
from moeserve.httpserver.generation.request.custom_tools import INPUT
from moeserve.httpserver.generation.request.documents import Document, document_of_base64, titled
from moeserve.httpserver.generation.request.foreign_history import types_of
from moeserve.httpserver.generation.request.pictures import (
    Picture,
    joined,
    max_tokens_of,
    picture_of_url,
)
from moeserve.httpserver.responses.client_tools import CLIENT_TOOLS
from moeserve.httpserver.responses.tools import Toolbox
from moeserve.httpserver.transport.request_model import NO_EFFECT, FreeDict, Label, RequestModel, unsupported

MAX_PARTS: Final = 1024


class InputText(RequestModel):
    type: Literal["input_text"]
    text: str


class OutputText(RequestModel):
    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[FreeDict], NO_EFFECT, Field(max_length=MAX_PARTS, default_factory=list)]
    logprobs: Annotated[Any, NO_EFFECT] = None


class InputImage(RequestModel):
    """A picture: PNG, JPEG, WebP, or a GIF's first frame."""

    type: Literal["input_image"]
    image_url: Annotated[str, Field(description="A data: URL: pictures are not fetched.")]
    detail: Annotated[
        Literal["auto", "low", "high", "original"] | None, Field(description="low: of 256 tokens at most.")
    ] = None
    file_id: Annotated[Any, unsupported("file_id")] = None

    @model_validator(mode="before")
    @classmethod
    def _without_object(cls, given: Any) -> Any:
        """Accepts the object of chat completions in the URL's place, which some clients send here, too."""
        if not isinstance(given, dict) or not isinstance(found := given.get("image_url"), dict):
            return given
        detail = given.get("detail") or found.get("detail")
        return given | {"image_url": found.get("url"), "detail": detail}

    @model_validator(mode="after")
    def _is_a_picture(self) -> InputImage:
        _ = self.picture  # refuses bytes that are not a picture
        return self

    @cached_property
    def picture(self) -> Picture:
        return picture_of_url(self.image_url, max_tokens_of(self.detail))

    @property
    def text(self) -> str:
        return self.picture.mark


class InputFile(RequestModel):
    """A text file, or a PDF whose text is read. The model sees it between tags."""

    type: Literal["input_file"]
    file_data: Annotated[str, Field(description="The file in base64, or as a data: URL.")]
    filename: str | None = None
    file_id: Annotated[Any, unsupported("file_id (send file_data)")] = None
    file_url: Annotated[Any, unsupported("file_url (send file_data)")] = None
    detail: Annotated[Any, NO_EFFECT] = None

    @cached_property
    def document(self) -> Document:
        return document_of_base64(self.file_data)

    @model_validator(mode="after")
    def _is_read(self) -> InputFile:
        _ = self.document  # refuses other files
        return self

    @property
    def text(self) -> str:
        return titled(self.filename, self.document).text


def _text_of(content: str | list[Any]) -> str:
    return content if isinstance(content, str) else joined(part.text for part in content)


def _to_parts(content: Any) -> Any:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


Part = Annotated[InputText | InputImage | InputFile | OutputText, Field(discriminator="type")]
Parts = Annotated[
    list[Part],
    BeforeValidator(_to_parts, json_schema_input_type=str | list[Part]),
    Field(max_length=MAX_PARTS),
]


class _Item(RequestModel):
    id: Label | None = None
    status: Annotated[Literal["in_progress", "completed", "incomplete"] | None, NO_EFFECT] = None


class MessageItem(_Item):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    phase: Annotated[Literal["commentary", "final_answer"] | None, NO_EFFECT] = None


# Fields of calls and outputs that clients send back; they have no effect.
_OF_A_CALL: Final = frozenset({"environment", "caller", "created_by"})


class FunctionCallItem(_Item):
    type: Literal["function_call"]
    call_id: Label
    name: Annotated[str, Field(max_length=1024)]
    namespace: Label | None = None
    arguments: CallArgumentsText = "{}"


class CustomCallItem(_Item):
    """A call of a tool that takes free text."""

    type: Literal["custom_tool_call"]
    call_id: Label
    name: Annotated[str, Field(max_length=1024)]
    namespace: Label | None = None
    input: str


class ShellCallItem(_Item):
    idle: ClassVar = _OF_A_CALL

    type: Literal["local_shell_call", "shell_call"]
    call_id: Label
    action: FreeDict

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in self.action.items() if name not in ("type", "env")}


class PatchCallItem(_Item):
    idle: ClassVar = _OF_A_CALL

    type: Literal["apply_patch_call"]
    call_id: Label
    operation: FreeDict

    def given(self) -> dict[str, Any]:
        return self.operation


def _to_output(given: Any) -> Any:
    """Accepts outputs of older Codex, which are an object with the text as `content`, and any other object."""
    if not isinstance(given, dict):
        return given
    content = given.get("content")
    return content if isinstance(content, str) else to_json(given)


_OutputPart = Annotated[InputText | InputImage | InputFile, Field(discriminator="type")]
_OutputParts = Annotated[list[_OutputPart], Field(max_length=MAX_PARTS)]
Output = Annotated[str | _OutputParts, BeforeValidator(_to_output, json_schema_input_type=str | _OutputParts)]


class CallOutputItem(_Item):
    """The output of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Label
    output: Output = ""
    name: Annotated[Label | None, NO_EFFECT] = None

    def text(self) -> str:
        return _text_of(self.output)


class ShellOutputItem(_Item):
    """The output of a shell call. Its id may equal the call's."""

    type: Literal["local_shell_call_output"]
    call_id: Label | None = None
    output: Output

    def text(self) -> str:
        return _text_of(self.output)


class Outcome(RequestModel):
    type: Literal["exit", "timeout"]
    exit_code: int = 0


class CommandOutput(RequestModel):
    """The output of one command of a shell call."""

    idle: ClassVar = _OF_A_CALL

    stdout: str = ""
    stderr: str = ""
    outcome: Outcome | None = None

    def text(self) -> str:
        ended = ""
        if self.outcome is not None and self.outcome.type == "timeout":
            ended = "timed out"
        elif self.outcome is not None and self.outcome.exit_code:
            ended = f"exit code {self.outcome.exit_code}"
        return "\n".join(part.rstrip("\n") for part in (self.stdout, self.stderr, ended) if part)


class CommandsOutputItem(_Item):
    idle: ClassVar = _OF_A_CALL | {"max_output_length"}

    type: Literal["shell_call_output"]
    call_id: Label
    output: Annotated[list[CommandOutput], Field(max_length=MAX_PARTS)]

    def text(self) -> str:
        return "\n".join(one.text() for one in self.output)


class PatchOutputItem(RequestModel):
    idle: ClassVar = _OF_A_CALL

    type: Literal["apply_patch_call_output"]
    id: Label | None = None
    call_id: Label
    status: Literal["completed", "failed"] = "completed"
    output: str = ""

    def text(self) -> str:
        return "\n".join([*(["The patch failed."] if self.status == "failed" else []), self.output])


class ItemReference(RequestModel):
    """A reference to an item of a stored response or of its input."""

    type: Literal["item_reference"]
    id: Label


class SummaryText(RequestModel):
    type: Literal["summary_text"]
    text: str


class ReasoningText(RequestModel):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(_Item):
    """The reasoning of an earlier turn. Its text is in `content`, else in `encrypted_content`. Content that another
    server has encrypted cannot be read and is left out."""

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryText], NO_EFFECT, Field(max_length=MAX_PARTS, default_factory=list)]
    content: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS, default_factory=list)]
    encrypted_content: str | None = None

    def text(self) -> str:
        if self.content or self.encrypted_content is None:
            return "".join(part.text for part in self.content)
        try:
            return base64.b64decode(self.encrypted_content, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            return ""


def opaque(thinking: str) -> str:
    """Returns `encrypted_content` for clients to send back. It is only encoded, not secret."""
    return base64.b64encode(thinking.encode()).decode()


def _typed(item: Any) -> Any:
    """Completes an item: a message may lack its type and have a string as content; a reference may be an id only."""
    if not isinstance(item, dict):
        return item
    if item.keys() == {"id"} or (item.get("type", 0) is None and "role" not in item):
        return item | {"type": "item_reference"}
    if "role" not in item:
        return item
    if item["role"] == "assistant" and isinstance(item.get("content"), str):
        item = item | {"content": [{"type": "output_text", "text": item["content"]}]}
    return {"type": "message"} | item


CallItem = FunctionCallItem | CustomCallItem | ShellCallItem | PatchCallItem
OutputItem = CallOutputItem | ShellOutputItem | CommandsOutputItem | PatchOutputItem
Item = Annotated[
    Annotated[
        MessageItem | CallItem | OutputItem | ReasoningItem | ItemReference, Field(discriminator="type")
    ],
    BeforeValidator(_typed),
]
KNOWN_TYPES: Final = types_of(
    MessageItem | CallItem | OutputItem | ReasoningItem | ItemReference,
)
_ITEMS: Final[TypeAdapter[list[Item]]] = TypeAdapter(list[Item])


def stored_items(items: list[dict[str, Any]]) -> list[Item]:
    """Parses items from the store, which holds valid items only."""
    return _ITEMS.validate_python(items)


def messages_of(instructions: str | None, items: list[Item], toolbox: Toolbox) -> list[dict[str, Any]]:
    """Returns the messages for the chat template. The model's output of one turn (reasoning, text, calls) becomes one
    message. References must have been resolved."""
    messages: list[dict[str, Any]] = [] if not instructions else [{"role": "system", "content": instructions}]
    turn: dict[str, Any] | None = None  # the model's message, while consecutive items belong to it
    for item in items:
        if isinstance(item, OutputItem):
            output = {
                "role": "tool",
                "content": item.text(),
                "tool_call_id": item.call_id or item.id,
            }
            messages.append(output)
            turn = None
            continue
        if isinstance(item, MessageItem) and item.role != "assistant":
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": _text_of(item.content)})
            turn = None
            continue
        if turn is None or ("tool_calls" in turn and not isinstance(item, CallItem)):
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        match item:
            case MessageItem():
                turn["content"] += _text_of(item.content)
            case ReasoningItem():
                turn["reasoning_content"] = turn.get("reasoning_content", "") + item.text()
            case FunctionCallItem() | CustomCallItem() | ShellCallItem() | PatchCallItem():
                call = {"id": item.call_id, "type": "function", "function": _function_of(item, toolbox)}
                turn.setdefault("tool_calls", []).append(call)
    return messages


def _function_of(item: CallItem, toolbox: Toolbox) -> dict[str, Any]:
    """Returns the call as the model made it."""
    match item:
        case CustomCallItem():
            return {"name": toolbox.shown(item.name, item.namespace), "arguments": {INPUT: item.input}}
        case ShellCallItem() | PatchCallItem():
            return _as_written(item.type.removesuffix("_call"), item.given(), toolbox)
        case FunctionCallItem():
            name = toolbox.shown(item.name, item.namespace)
            return {"name": name, "arguments": arguments_for_template(item.arguments)}


def _as_written(kind: str, given: dict[str, Any], toolbox: Toolbox) -> dict[str, Any]:
    """Returns the call with its arguments in the parameters' order, in which the model wrote them. Clients reorder
    them, and the prompt would no longer match the prefix cache."""
    names = [*CLIENT_TOOLS[kind].parameters["properties"], *given]
    return {
        "name": toolbox.shown(kind),
        "arguments": {name: given[name] for name in names if name in given},
    }
