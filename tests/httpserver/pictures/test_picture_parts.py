"""Parts of conversations that hold pictures as other APIs, libraries and tools write them."""

from __future__ import annotations

import base64
import os
from typing import Any

import pytest

from moeserve.messages.pictures import EncodePicture, PictureEncoded, PixelBounds
from tests.support.pictures.picture_fixture import picture_cases
from tests.support.pictures.visual_server import VisualServer
from tests.support.servers.http_harness import NAME, HttpServer, tokens_of
from tests.support.servers.waiting import within

FILE = picture_cases()["square"].path.read_bytes()
BASE64 = base64.b64encode(FILE).decode()
URL = f"data:image/png;base64,{BASE64}"


def chat(part: dict[str, Any]) -> dict[str, Any]:
    return {"model": NAME, "max_tokens": 2, "messages": [{"role": "user", "content": [part]}]}


PARTS: dict[str, dict[str, Any]] = {
    "a detail beside the URL": {"type": "image_url", "image_url": {"url": URL}, "detail": "high"},
    "no type": {"image_url": {"url": URL}},  # antirez/ds4, pull request 950
    "Qwen's": {"type": "image", "image": URL},  # QwenLM/Qwen3-VL, issues 174 and 213
    "MCP's": {"type": "image", "data": BASE64, "mimeType": "image/png"},
    "Anthropic's": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}},
    "Anthropic's URL": {"type": "image", "source": {"type": "url", "url": URL}},
    "transformers' URL": {"type": "image", "url": URL},
    "transformers' base64": {"type": "image", "base64": BASE64},
    "LangChain's": {"type": "image", "source_type": "base64", "mime_type": "image/png", "data": BASE64},
    "LangChain 1.0's": {"type": "image", "base64": BASE64, "mime_type": "image/png", "id": "a"},
    "LiteLLM's": {"type": "image_url", "image_url": {"url": URL, "format": "image/png"}},
    "a URL of the other type": {"type": "image", "image_url": {"url": URL, "detail": "auto"}},
    "the Responses API's": {"type": "input_image", "image_url": {"url": URL}},
    "Gemini's": {"inline_data": {"mime_type": "image/png", "data": BASE64}},
    "Gemini's in JavaScript": {"type": "image", "inlineData": {"mimeType": "image/png", "data": BASE64}},
    "Gemini's in LangChain": {"type": "media", "mime_type": "image/png", "data": BASE64},
    "Bedrock's": {"image": {"format": "png", "source": {"bytes": BASE64}}},
    "LangChain's file": {"type": "file", "source_type": "base64", "mime_type": "image/png", "data": BASE64},
    "the AI SDK's": {"type": "file", "mediaType": "image/png", "data": BASE64},
    "a detail of C#": {"type": "image_url", "image_url": {"url": URL, "detail": "Auto"}},
    "no detail": {"type": "image_url", "image_url": {"url": URL, "detail": ""}},
    "a file": {"type": "file", "file": {"filename": "a.png", "file_data": URL}},
    "MCP's resource": {
        "type": "resource",
        "resource": {"uri": "file:///a.png", "mimeType": "image/png", "blob": BASE64},
    },
}


@pytest.mark.parametrize("name", PARTS)
def test_other_apis_parts(seeing: HttpServer, visual: VisualServer, name: str) -> None:
    """Agents pass on what their tools give."""
    answer = seeing.post("/v1/chat/completions", chat(PARTS[name]))
    assert answer.status_code == 200, answer.text
    assert [one.data for one in visual.pictures] == [FILE]


def test_a_single_part_and_ollamas_images(seeing: HttpServer, visual: VisualServer) -> None:
    """`images` beside the content were dropped, and the model answered without them."""
    part = {"type": "image_url", "image_url": {"url": URL}}
    for message in ({"content": part}, {"content": "a", "images": [BASE64, URL]}, {"images": [part]}):
        body = {"model": NAME, "max_tokens": 2, "messages": [{"role": "user"} | message]}
        answer = seeing.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
    assert [one.data for one in visual.pictures] == [FILE] * 4
    messages = [{"role": "system", "content": "b", "images": [part]}, {"role": "user", "content": "a"}]
    answer = seeing.post("/v1/chat/completions", {"model": NAME, "max_tokens": 2, "messages": messages})
    assert answer.status_code == 400
    assert "role system cannot contain pictures" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"max_pixels": 200704}, PixelBounds(None, 200704)),
        ({"min_pixels": 3136, "max_pixels": 200704}, PixelBounds(3136, 200704)),
        ({"min_pixels": None}, None),
    ],
)
def test_bounds_of_pixels(
    seeing: HttpServer, visual: VisualServer, more: dict[str, Any], expected: PixelBounds | None
) -> None:
    """Qwen's; beside the picture or in its object. They were dropped."""
    for part in (
        {"type": "image", "image": URL} | more,
        {"type": "image_url", "image_url": {"url": URL}} | more,
        {"type": "image_url", "image_url": {"url": URL} | more},
    ):
        answer = seeing.post("/v1/chat/completions", chat(part))
        assert answer.status_code == 200, answer.text
    assert [one.pixels for one in visual.pictures] == [expected] * 3


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image", "image": URL, "max_pixels": 0}, "whole numbers above 0"),
        ({"type": "image", "image": URL, "min_pixels": True}, "whole numbers above 0"),
        ({"type": "image", "image": URL, "min_pixels": 9, "max_pixels": 8}, "min_pixels must not exceed"),
        ({"type": "image", "image": URL, "resized_height": 280}, "resized_height beside a picture is not"),
        ({"type": "video", "video": URL, "max_pixels": 8}, "max_pixels beside a video is not supported"),
        ({"type": "video", "video": URL, "total_pixels": 8}, "total_pixels beside a video is not supported"),
    ],
)
def test_sizes_that_are_refused(seeing: HttpServer, part: dict[str, Any], message: str) -> None:
    answer = seeing.post("/v1/chat/completions", chat(part))
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


VIDEO = base64.b64encode(b"a video").decode()
VIDEO_URL = f"data:video/mp4;base64,{VIDEO}"
VIDEOS: dict[str, dict[str, Any]] = {
    "LangChain's": {"type": "video", "base64": VIDEO, "mime_type": "video/mp4"},
    "Gemini's": {"inlineData": {"mimeType": "video/mp4", "data": VIDEO}},
    "Gemini's in LangChain": {"type": "media", "mime_type": "video/webm", "data": VIDEO},
    "a file": {"type": "file", "file": {"filename": "a.mp4", "file_data": VIDEO_URL}},
    "a picture's URL": {"type": "image_url", "image_url": {"url": VIDEO_URL}},
    "of the Responses API's kind": {"type": "input_video", "video_url": VIDEO_URL},
}


@pytest.mark.parametrize("name", VIDEOS)
def test_other_apis_videos(seeing: HttpServer, visual: VisualServer, name: str) -> None:
    answer = seeing.post("/v1/chat/completions", chat(VIDEOS[name]))
    assert answer.status_code == 200, answer.text
    (found,) = visual.pictures
    assert found.data == b"a video"
    assert found.video is not None


def test_resources_and_files_that_are_no_pictures(seeing: HttpServer, visual: VisualServer) -> None:
    resource = {
        "type": "resource",
        "resource": {"uri": "file:///a.txt", "mimeType": "text/plain", "text": "A"},
    }
    assert seeing.post("/v1/chat/completions", chat(resource)).status_code == 200
    assert "A<|im_end|>" in seeing.tokenizer.decode(tokens_of(seeing.requests[0]), False)
    pdf = "data:application/pdf;base64,JVBERi0="
    parts: tuple[tuple[dict[str, Any], str], ...] = (
        ({"type": "file", "file": {"filename": "a.pdf", "file_data": pdf}}, "the PDF is damaged"),
        ({"type": "file", "file": {"file_id": "file-1"}}, "file.file_data"),
        (
            {"type": "resource", "resource": {"mimeType": "application/pdf", "blob": "JVBERi0="}},
            "the PDF is damaged",
        ),
    )
    for part, why in parts:
        answer = seeing.post("/v1/chat/completions", chat(part))
        assert answer.status_code == 400
        assert why in answer.json()["error"]["message"]
    assert not visual.pictures


def test_an_object_in_the_responses_api(seeing: HttpServer, visual: VisualServer) -> None:
    """Chat completions' object in the place of a string."""
    part = {"type": "input_image", "image_url": {"url": URL, "detail": "low"}}
    body = {"model": NAME, "max_output_tokens": 2, "input": [{"role": "user", "content": [part]}]}
    assert seeing.post("/v1/responses", body).status_code == 200
    assert [(one.data, one.max_tokens) for one in visual.pictures] == [(FILE, 256)]


def test_the_embeddings_of_a_prompt_are_bounded(seeing: HttpServer, visual: VisualServer) -> None:
    """It is refused before the rest of its pictures is encoded, and leaves no files."""

    def large(picture: EncodePicture) -> PictureEncoded:
        answer = visual.encoded(picture)
        os.truncate(visual.paths.spans / answer.handle, 200 << 20)  # a file with a hole
        return answer

    visual.answer = large
    part = {"type": "image_url", "image_url": {"url": URL}}
    for count, status in ((2, 200), (5, 400)):
        body = chat(part)
        body["messages"][0]["content"] *= count
        answer = seeing.post("/v1/chat/completions", body)
        assert answer.status_code == status, answer.text
    assert "embeddings take more than 512 MiB" in answer.json()["error"]["message"]
    assert len(visual.pictures) == 2 + 3
    assert within(60, lambda: not visual.left)
