"""Converts message parts with files from other APIs' forms to those of `chat_messages.py`."""

from __future__ import annotations

from typing import Any, Final

from moeserve.httpserver.generation.request.data_urls import data_type
from moeserve.httpserver.generation.request.documents import in_tags

# Gemini's objects, which agents pass on unchanged, with or without a type.
_INLINE: Final = ("inline_data", "inlineData")
# Types of parts whose own fields say what they hold: LangChain's, the AI SDK's and Gemini's in LangChain.
_FILES: Final = ("file", "media", "video")
_MEDIA_TYPES: Final = ("mimeType", "mime_type", "media_type", "mediaType")
_DATA: Final = ("data", "base64", "blob", "url")
_PICTURES: Final = ("image_url", "input_image", "image", "file")
_NAMES: Final = ("filename", "file_name", "name", "title", "uri")
_VIDEO_SETTINGS: Final = ("fps", "max_frames")


def in_own_form(part: dict[str, Any]) -> dict[str, Any]:
    """Returns a part as `image`, `video` or `file` if it has a file in another API's form, else the part."""
    for name in _INLINE:
        if isinstance(inline := part.get(name), dict):
            return _of_media(inline) or _of_document(inline)
    kind, image = part.get("type"), part.get("image")
    if kind is None and isinstance(image, dict) and isinstance(source := image.get("source"), dict):
        return {"type": "image", "data": source.get("bytes")}  # Amazon Bedrock's
    if (document := _document_in(part)) is not None:
        return document
    if kind == "input_video":
        return part | {"type": "video_url"}
    if kind in _FILES and (media := _of_media(part)) is not None:
        return media
    if kind in ("file", "media") and _data_of(part) is not None:
        return _of_document(part)
    if kind in _PICTURES and (url := _url_of(part)) is not None and _is_video(data_type(url)):
        return {"type": "video", "video": url}
    return part


def _document_in(part: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the document in a part of another API's type; None if the part has none."""
    match part:
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            about = {name: part[name] for name in ("title", "context") if isinstance(part.get(name), str)}
            return {"type": "text", "text": in_tags("document", about, text)}  # Anthropic's
        case {"type": "document", "source": {} as source}:
            return _of_document(source, part.get("title"))
        case {"type": "input_file"}:
            return {"type": "file", "file": part}  # the Responses API's
        case {"type": "text-plain" | "file", "text": str(text)}:
            return {
                "type": "text",
                "text": in_tags("document", {"title": _name_of(part)}, text),
            }  # LangChain's
        case {"type": "resource", "resource": {"blob": str()} as resource}:
            return _of_media(resource) or _of_document(resource)  # MCP's
    return None


def _of_document(given: dict[str, Any], title: Any = None) -> dict[str, Any]:
    """given: an object that has a file in base64. Returns it in OpenAI's form."""
    return {"type": "file", "file": {"file_data": _data_of(given), "filename": title or _name_of(given)}}


def _name_of(given: dict[str, Any]) -> str | None:
    """LangChain's parts have the name beside their content or in one of two objects."""
    around = [given, *(one for one in (given.get("extras"), given.get("metadata")) if isinstance(one, dict))]
    return next((one[name] for one in around for name in _NAMES if isinstance(one.get(name), str)), None)


def _data_of(given: dict[str, Any]) -> str | None:
    return next((given[name] for name in _DATA if isinstance(given.get(name), str)), None)


def _of_media(given: dict[str, Any]) -> dict[str, Any] | None:
    """given: an object that names its media type and has a file in base64 or a URL. None if it does not, or if the file
    is neither a picture nor a video."""
    named = next((given[name] for name in _MEDIA_TYPES if isinstance(given.get(name), str)), "")
    data = _data_of(given)
    if data is None:
        return None
    if named.lower().startswith("image/"):
        return {"type": "image", "data": data}
    if not _is_video(named):
        return None
    settings = {name: given[name] for name in _VIDEO_SETTINGS if name in given}
    is_url = "url" in given or data_type(data) is not None
    return {"type": "video", "video": data if is_url else f"data:video/mp4;base64,{data}"} | settings


def _url_of(part: dict[str, Any]) -> str | None:
    given = part.get("image_url") or part.get("image") or part.get("file")
    if isinstance(given, dict):
        given = given.get("url") or given.get("file_data")
    return given if isinstance(given, str) else None


def _is_video(media_type: str | None) -> bool:
    return media_type is not None and media_type.lower().startswith("video/")
