"""Messages of a conversation in the form of OpenAI's chat API, for which chat templates are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from moeserve.httpserver.generation.chat.chat_tools import (
    ChatToolCall,
    CustomCallMessage,
    FunctionCall,
    ToolCallMessage,
)
from moeserve.httpserver.generation.request.data_urls import data_type
from moeserve.httpserver.generation.request.documents import Document, document_of_base64, titled
from moeserve.httpserver.generation.request.fields import MAX_MESSAGES
from moeserve.httpserver.generation.request.foreign_parts import in_own_form
from moeserve.httpserver.generation.request.pictures import (
    PIXEL_FIELDS,
    Picture,
    PicturedText,
    joined,
    max_tokens_of,
    picture_of_url,
    pixel_bounds,
)
from moeserve.httpserver.generation.request.videos import VIDEO_FIELDS, video_of_part
from moeserve.httpserver.transport.request_model import (
    IDLE_ANYWHERE,
    NO_EFFECT,
    FreeDict,
    Label,
    RequestModel,
    unsupported,
)
from moeserve.httpserver.transport.unknown_fields import drop_unknown
from moeserve.tokenizer.renderer import RESERVED

# The field with a part's text, by the part's type; the last two types are the Responses API's.
_TEXT_PARTS: Final = {"text": "text", "refusal": "refusal", "input_text": "text", "output_text": "text"}


_REASONING_PARTS: Final = ("thinking", "reasoning", "redacted_thinking")
_PICTURE_FIELDS: Final = {"type", "image_url", "detail", *PIXEL_FIELDS}
_VIDEO_PARTS: Final = {
    "video_url": VIDEO_FIELDS | {"video_url"},  # vLLM's
    "video": VIDEO_FIELDS | {"video", "url"},  # Qwen's and transformers'
}
_SIDES: Final = ("resized_height", "resized_width")
_URL_FIELDS: Final = ("url", "data", "base64", "blob", "file_data")  # of an object with a picture
# The fields of pictures by the part's type. `image` is the type of Qwen's and transformers' messages (`image`, `url`,
# `base64`), of MCP (`data`, `mimeType`), of LangChain (`source_type`, `mime_type`) and of Anthropic (`source`), whose
# pictures some agents pass on unchanged. `resource` is MCP's file, and `file` OpenAI's.
_PICTURE_PARTS: Final = {
    "image_url": _PICTURE_FIELDS,
    "input_image": _PICTURE_FIELDS,
    "image": {
        *("type", "image", "image_url", "url", "base64", "data", "source", "detail"),
        *("mimeType", "mime_type", "media_type", "source_type", "id"),
        *PIXEL_FIELDS,
    },
    "resource": {"type", "resource"},
    "file": {"type", "file"},
}


def _parts_to_text(content: Any, info: ValidationInfo) -> Any:
    """Joins text parts by newlines, as vLLM does, because templates take strings. Content with pictures becomes a
    PicturedText."""
    if isinstance(content, dict):
        content = [content]  # a single part
    if not isinstance(content, list):
        return content
    found = [part if isinstance(part, str) else _part(part, info) for part in content]
    text = joined(_text_of(part) for part in found)
    pictures = tuple(part for part in found if isinstance(part, Picture))
    pdfs = tuple(part.pdf for part in found if isinstance(part, Document) and part.pdf is not None)
    return PicturedText(text, pictures, pdfs) if pictures or pdfs else text


def _text_of(part: str | Picture | Document) -> str:
    match part:
        case Picture():
            return part.mark
        case Document():
            return part.text
        case _:
            return part


def _part(part: Any, info: ValidationInfo) -> str | Picture | Document:
    part = in_own_form(part) if isinstance(part, dict) else part
    kind = part.get("type", _untyped(part)) if isinstance(part, dict) else None
    given = {name for name, value in part.items() if value is not None} if isinstance(part, dict) else set()
    if isinstance(kind, str) and kind in _PICTURE_PARTS and _is_picture(kind, part):
        _refuse_sizes("picture", given, _SIDES)
        _check_fields("picture", given - _PICTURE_PARTS[kind] - IDLE_ANYWHERE, info)
        return _picture(part)
    if isinstance(kind, str) and kind in _VIDEO_PARTS:
        _refuse_sizes("video", given, (*_SIDES, *PIXEL_FIELDS, "total_pixels"))
        _check_fields("video", given - _VIDEO_PARTS[kind] - IDLE_ANYWHERE, info)
        return video_of_part(part)
    if kind == "resource" and isinstance(part.get(kind), dict) and isinstance(part[kind].get("text"), str):
        return str(part[kind]["text"])
    if kind == "file" and isinstance(file := part.get("file"), dict):
        _check_fields("file", given - {"type", "file"} - IDLE_ANYWHERE, info)
        return _document(file)
    field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None or not isinstance(part.get(field), str):
        raise PydanticCustomError(
            "content_part",
            "a part of the type {kind} is not supported, only texts, files, pictures and videos are: {form}",
            {"form": '{"type": "text", "text": "..."}', "kind": repr(kind)[:80]},
        )
    _check_fields("text", given - {"type", field} - IDLE_ANYWHERE, info)
    text: str = part[field]
    return text


def _document(file: dict[str, Any]) -> Document:
    """Returns the document in OpenAI's object of a file. Raises PydanticCustomError."""
    data, name = file.get("file_data"), file.get("filename")
    if not isinstance(data, str):
        message = "a file part needs its file in base64 as file.file_data: files are not fetched, nor taken by file_id"
        raise PydanticCustomError("content_part", message)
    return titled(name, document_of_base64(data))


def _reasoning_of(part: dict[str, Any]) -> str:
    """Returns the text of a part with reasoning: a string, or Mistral's list of texts."""
    given = next((part[name] for name in ("thinking", "reasoning", "text") if name in part), "")
    parts = given if isinstance(given, list) else [given]
    texts = [one.get("text") if isinstance(one, dict) else one for one in parts]
    return "".join(text for text in texts if isinstance(text, str))


def _is_picture(kind: str, part: dict[str, Any]) -> bool:
    """Returns whether a part of a type in _PICTURE_PARTS has a picture: a file may be anything else."""
    if kind not in ("file", "resource"):
        return True
    file = part.get(kind)
    if not isinstance(file, dict):
        return False
    url = file.get("file_data")
    named = data_type(url) if isinstance(url, str) else file.get("mimeType") if "blob" in file else None
    return isinstance(named, str) and named.lower().startswith("image/")


def _untyped(part: dict[str, Any]) -> str | None:
    """Returns the type of a part that names none."""
    return next((field for field in ("text", "image_url", "video_url") if field in part), None)


def _refuse_sizes(what: str, given: set[str], names: Sequence[str]) -> None:
    """Refuses fields of Qwen's that would change the picture that the model sees. Raises PydanticCustomError."""
    if found := [name for name in names if name in given]:
        raise PydanticCustomError(
            "content_part",
            "the field {name} beside a {what} is not supported; leave it out",
            {"name": found[0], "what": what},
        )


def _check_fields(what: str, unknown: set[str], info: ValidationInfo) -> None:
    if unknown and not drop_unknown(info, "messages[].content[].", unknown):
        raise PydanticCustomError(
            "content_part",
            "a {what} part has no field {name}",
            {"what": what, "name": repr(min(unknown))[:80]},
        )


def _picture(part: dict[str, Any]) -> Picture:
    """Returns the picture of an image part. Some clients send the URL itself instead of OpenAI's object with a
    `url`."""
    fields = ("image_url", "image", "url", "base64", "data", "source", "resource", "file")
    given = next((part[field] for field in fields if part.get(field) is not None), None)
    if not isinstance(given, dict):
        return picture_of_url(given, max_tokens_of(part.get("detail")), pixel_bounds(part))
    url = next((given[field] for field in _URL_FIELDS if given.get(field) is not None), None)
    detail = max_tokens_of(given.get("detail", part.get("detail")))
    return picture_of_url(url, detail, pixel_bounds(part, given))


def _no_reserved_names(kwargs: dict[str, Any]) -> dict[str, Any]:
    taken = sorted(RESERVED & kwargs.keys())
    if taken:
        raise PydanticCustomError("reserved", "may not set {names}", {"names": ", ".join(taken)})
    return kwargs


_ROLES: Final = {
    "developer": "system",
    "function": "tool",
}  # roles that templates may not know, and the roles that replace them


class Message(RequestModel):
    """One message of the conversation. The reasoning of earlier turns is passed on; the template decides which of it
    the model sees. A developer message is rendered as a system message, its older name, because templates that do not
    know the role would drop it silently. A function message is rendered as a tool message, its newer form."""

    empty: ClassVar = frozenset({"tool_calls", "function_call", "audio", "images"})

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[
        Any,
        AfterValidator(_parts_to_text),
        Field(
            description="A string, or a list of parts: texts, strings, files, and pictures and videos as data: URLs."
        ),
    ] = None
    images: Annotated[
        list[Any] | None,
        Field(description="Ollama's form: pictures before the content, in base64, as URLs or as parts."),
    ] = None
    name: Label | None = None
    tool_calls: Annotated[list[ChatToolCall], Field(max_length=1024, default_factory=list)]
    tool_call_id: Label | None = None
    reasoning_content: str | None = None
    reasoning: Annotated[str | None, Field(description="Another name for reasoning_content.")] = None

    refusal: Annotated[str | None, NO_EFFECT] = None
    audio: Annotated[Any, unsupported("audio")] = None
    function_call: Annotated[
        FunctionCall | None, Field(description="The older form of one call in tool_calls.")
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _reasoning_is_no_part(cls, message: Any) -> Any:
        """Some clients send earlier reasoning as parts of the content: Anthropic's, Mistral's and the AI SDK's."""
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list) or message.get("role") != "assistant":
            return message
        found = [part for part in content if isinstance(part, dict) and part.get("type") in _REASONING_PARTS]
        if not found:
            return message
        rest = {"content": [part for part in content if part not in found]}
        reasoning = "".join(_reasoning_of(part) for part in found)
        is_told = message.get("reasoning_content") or message.get("reasoning") or not reasoning
        return message | rest | ({} if is_told else {"reasoning_content": reasoning})

    @model_validator(mode="before")
    @classmethod
    def _images_are_parts(cls, message: Any) -> Any:
        """Ollama's `images` stand before the content."""
        images = message.get("images") if isinstance(message, dict) else None
        if not isinstance(images, list) or not images:
            return message
        content = message.get("content") or []
        parts = [each if isinstance(each, dict) else {"type": "image", "image": each} for each in images]
        parts += content if isinstance(content, list) else [content]
        return {name: value for name, value in message.items() if name != "images"} | {"content": parts}

    @model_validator(mode="after")
    def _content_is_text(self) -> Message:
        if self.content is None:
            if self.role not in ("assistant", "tool", "function"):  # a tool may return nothing
                raise PydanticCustomError(
                    "content", "content is required for the role {role}", {"role": self.role}
                )
        elif isinstance(self.content, PicturedText):
            # An assistant's are those of another model that draws, in a conversation that goes on here.
            if self.role not in ("user", "assistant", "tool", "function"):
                raise PydanticCustomError(
                    "content",
                    "messages of role {role} cannot contain pictures and PDFs; send them in a message of "
                    "role user",
                    {"role": self.role},
                )
        elif not isinstance(self.content, str):
            raise PydanticCustomError("content", "content must be a string or a list of text parts")
        if self.role == "function" and not self.name:
            raise PydanticCustomError("name", "name is required for the role function")
        if self.function_call is not None and self.tool_calls:
            raise PydanticCustomError(
                "function_call", "function_call cannot be combined with tool_calls; send tool_calls only"
            )
        return self

    @property
    def calls(self) -> list[ToolCallMessage | CustomCallMessage]:
        """Returns the calls, in the newer or the older form."""
        if self.function_call is not None:
            return [ToolCallMessage(function=self.function_call)]
        return self.tool_calls

    def for_template(self) -> dict[str, Any]:
        content = self.content.text if isinstance(self.content, PicturedText) else self.content
        message: dict[str, Any] = {
            "role": _ROLES.get(self.role, self.role),
            "content": content if content is not None else "",
        }
        for name in ("name", "tool_call_id"):
            if value := getattr(self, name):
                message[name] = value
        if calls := self.calls:
            message["tool_calls"] = [call.for_template() for call in calls]
        if reasoning := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = reasoning
        return message


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
TemplateKwargs = Annotated[
    FreeDict,
    AfterValidator(_no_reserved_names),
    Field(description='Variables for the chat template, such as {"enable_thinking": false}.'),
]
