"""Videos in conversations: `Picture`s of several frames."""

from __future__ import annotations

from typing import Any, Final

from pydantic_core import PydanticCustomError

from moeserve.httpserver.generation.request.data_urls import base64_bytes, data_type
from moeserve.httpserver.generation.request.pictures import (
    Picture,
    checked_url,
    picture_of_url,
)
from moeserve.messages.pictures import DEFAULT_FPS, MOST_FRAMES, VideoSettings

VIDEO_FIELDS: Final = {"type", "fps", "max_frames"}
LEAST_FPS: Final = 0.01
MOST_FPS: Final = 60.0
_FRAMES_TYPE: Final = "video/jpeg"  # of a data URL with frames, each in base64, between commas (vLLM)


def video_of_part(part: dict[str, Any]) -> Picture:
    """Returns the video of a part `video_url` (vLLM) or `video` (Qwen). Its value is a URL, an object with a `url`, or
    a list of pictures, which are its frames. Raises PydanticCustomError for a value of another form, too many frames,
    or a number out of range."""
    fps = _number(part, "fps", LEAST_FPS, MOST_FPS)
    frames = _number(part, "max_frames", 2, MOST_FRAMES)
    settings = VideoSettings(
        DEFAULT_FPS if fps is None else float(fps), MOST_FRAMES if frames is None else int(frames)
    )
    given = next(
        (part[field] for field in ("video_url", "video", "url") if part.get(field) is not None), None
    )
    if isinstance(given, list):
        _check_count(len(given), settings)
        return _of_frames([picture_of_url(_url_of(one)) for one in given], settings)
    return _of_url(_url_of(given), settings)


def _url_of(given: Any) -> Any:
    """Returns the URL of an object that has one, such as a part `image_url`; otherwise the value itself."""
    for field in ("image_url", "image", "url"):
        if isinstance(given, dict) and field in given:
            given = given[field]
    return given


def _of_url(url: Any, settings: VideoSettings) -> Picture:
    if not isinstance(url, str):
        raise PydanticCustomError("video", "the video must be a URL, or a list of its frames' URLs")
    kind = data_type(url)
    if kind is None:
        return Picture(b"", url=checked_url(url, "video"), video=settings)
    if kind == _FRAMES_TYPE:
        _check_count(url.count(","), settings)
        _, *frames = url.split(",")
        return _of_frames([Picture(base64_bytes(frame, "video's frame")) for frame in frames], settings)
    return Picture(base64_bytes(url, "video"), video=settings)


def _check_count(frames: int, settings: VideoSettings) -> None:
    """Refuses too many frames before the first is decoded: a request may have millions of tiny ones. Raises
    PydanticCustomError."""
    if not 1 <= frames <= settings.max_frames:
        raise PydanticCustomError(
            "video",
            "a video has 1 to {most} frames, not {count}",
            {"most": settings.max_frames, "count": frames},
        )


def _of_frames(frames: list[Picture], settings: VideoSettings) -> Picture:
    return Picture(b"", video=settings, frames=tuple(frames))


def _number(part: dict[str, Any], name: str, least: float, most: float) -> float | None:
    value = part.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise PydanticCustomError(
            "video",
            "{name} must be a number from {least} to {most}",
            {"name": name, "least": least, "most": most},
        )
    return value
