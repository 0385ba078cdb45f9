"""Pictures and videos in the forms of other APIs' parts, as the forms of `chat_messages.py`."""

from __future__ import annotations

from typing import Any, Final

from moeserve.httpserver.generation.request.pictures import data_type

# Gemini's objects, which agents pass on unchanged, with or without a type.
_INLINE: Final = ("inline_data", "inlineData")
# Types of parts whose own fields say what they hold: LangChain's, the AI SDK's and Gemini's in LangChain.
_FILES: Final = ("file", "media", "video")
_MEDIA_TYPES: Final = ("mimeType", "mime_type", "media_type", "mediaType")
_DATA: Final = ("data", "base64", "url")
_PICTURES: Final = ("image_url", "input_image", "image", "file")
_VIDEO_SETTINGS: Final = ("fps", "max_frames")


def in_own_form(part: dict[str, Any]) -> dict[str, Any]:
    """Returns a part as `image` or `video` if it has a picture or a video in another API's form, else the part."""
    for name in _INLINE:
        if isinstance(inline := part.get(name), dict):
            return _of_media(inline) or part
    kind, image = part.get("type"), part.get("image")
    if kind is None and isinstance(image, dict) and isinstance(source := image.get("source"), dict):
        return {"type": "image", "data": source.get("bytes")}  # Amazon Bedrock's
    if kind == "input_video":
        return part | {"type": "video_url"}
    if kind in _FILES and (media := _of_media(part)) is not None:
        return media
    if kind in _PICTURES and (url := _url_of(part)) is not None and _is_video(data_type(url)):
        return {"type": "video", "video": url}
    return part


def _of_media(given: dict[str, Any]) -> dict[str, Any] | None:
    """given: an object that names its media type and has a file in base64 or a URL. None if it does not, or if the file
    is neither a picture nor a video."""
    named = next((given[name] for name in _MEDIA_TYPES if isinstance(given.get(name), str)), "")
    data = next((given[name] for name in _DATA if isinstance(given.get(name), str)), None)
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
