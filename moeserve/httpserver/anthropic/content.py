"""Anthropic's content blocks: pictures, and the blocks that become text here (texts, documents, search results).

Source: Anthropic's API reference (Messages, version 2023-06-01) and its Python client's types.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Final, Literal, Protocol

from pydantic import BeforeValidator, Field, model_validator

from moeserve.httpserver.generation.request.documents import Document, document_of_base64, in_tags
from moeserve.httpserver.generation.request.pictures import (
    Picture,
    joined,
    picture_of_base64,
    picture_of_url,
)
from moeserve.httpserver.transport.request_model import Advisory, FreeDict, Label, RequestModel, unsupported

MAX_BLOCKS: Final = 1024
CACHED: Final = Advisory("Has no effect: prefixes are cached without being asked.")
_UNCITED: Final = Advisory("Has no effect: answers cite nothing.")


class HasText(Protocol):
    @property
    def text(self) -> str: ...


class Block(RequestModel):
    cache_control: Annotated[FreeDict | None, CACHED] = None


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: Annotated[Any, unsupported("citations", [])] = None


def text_to_block(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def text_of(blocks: Sequence[HasText]) -> str:
    return joined(block.text for block in blocks)


Texts = Annotated[
    list[TextBlock],
    BeforeValidator(text_to_block, json_schema_input_type=str | list[TextBlock]),
    Field(max_length=MAX_BLOCKS),
]


class PlainTextSource(RequestModel):
    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str

    @property
    def text(self) -> str:
        return self.data


class Base64Source(RequestModel):
    type: Literal["base64"]
    media_type: Annotated[Label, Field(description="What the picture says itself counts.")] = "image/png"
    data: str

    @cached_property
    def picture(self) -> Picture:
        return picture_of_base64(self.data)


class UrlSource(RequestModel):
    type: Literal["url"]
    url: Annotated[
        str, Field(description="A data: URL, or an address whose host --allowed-media-domains names.")
    ]

    @cached_property
    def picture(self) -> Picture:
        return picture_of_url(self.url)


class ImageBlock(Block):
    """A picture: PNG, JPEG, WebP, or a GIF's first frame."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]

    @model_validator(mode="after")
    def _is_a_picture(self) -> ImageBlock:
        _ = self.source.picture  # refuses bytes that are not a picture
        return self

    @property
    def text(self) -> str:
        return self.source.picture.mark


class FileSource(RequestModel):
    type: Literal["base64"]
    media_type: Annotated[Label, Field(description="Has no effect: the file's own bytes decide.")] = (
        "application/pdf"
    )
    data: Annotated[str, Field(description="A PDF, whose text is read, or a text file.")]

    @cached_property
    def document(self) -> Document:
        return document_of_base64(self.data)

    @model_validator(mode="after")
    def _is_read(self) -> FileSource:
        _ = self.document  # refuses other files
        return self

    @property
    def text(self) -> str:
        return self.document.text


class ContentSource(RequestModel):
    type: Literal["content"]
    content: Annotated[
        list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]],
        BeforeValidator(text_to_block, json_schema_input_type=str | list[TextBlock | ImageBlock]),
        Field(max_length=MAX_BLOCKS),
    ]

    @property
    def text(self) -> str:
        return text_of(self.content)


class DocumentBlock(Block):
    """A document: texts and pictures, or a PDF whose text is read. The model sees it between tags."""

    type: Literal["document"]
    source: Annotated[PlainTextSource | FileSource | ContentSource, Field(discriminator="type")]
    title: Label | None = None
    context: Annotated[str | None, Field(description="What is to be known about the document.")] = None
    citations: Annotated[FreeDict | None, _UNCITED] = None

    @property
    def text(self) -> str:
        about = {"title": self.title, "context": self.context}
        return in_tags("document", about, self.source.text)


class SearchResultBlock(Block):
    """A result of a search that the client ran; the model sees it between tags."""

    type: Literal["search_result"]
    source: Annotated[str, Field(max_length=1 << 16, description="Where it is from, such as a URL.")]
    title: Label
    content: Texts
    citations: Annotated[FreeDict | None, _UNCITED] = None

    @property
    def text(self) -> str:
        return in_tags("search_result", {"source": self.source, "title": self.title}, text_of(self.content))


class ToolReferenceBlock(RequestModel):
    """A tool that the client's tool search found. It has no effect: every tool is in the prompt anyway."""

    type: Literal["tool_reference"]
    tool_name: Label

    @property
    def text(self) -> str:
        return self.tool_name


ResultBlock = Annotated[
    ImageBlock | TextBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock,
    Field(discriminator="type"),
]
