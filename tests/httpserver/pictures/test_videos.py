"""Videos in chat requests: what httpserver sends to the visual server, and what to the engine."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from moeserve.messages.pictures import EncodePicture, PictureEncoded, PictureRefused, VideoSettings
from tests.support.pictures.picture_fixture import GEMMA_MODEL, GEMMA_TOWER
from tests.support.pictures.visual_server import VisualServer, seeing_server
from tests.support.servers.http_harness import NAME, HttpServer, tokens_of
from tests.support.servers.waiting import within

BASE64 = base64.b64encode(b"a video").decode()
URL = f"data:video/mp4;base64,{BASE64}"
FRAMES = [base64.b64encode(b"one").decode(), base64.b64encode(b"two").decode()]
FRAME_URLS = [f"data:image/jpeg;base64,{frame}" for frame in FRAMES]
START, PAD, END = 628, 630, 629


def encoded(visual: VisualServer, picture: EncodePicture) -> PictureEncoded:
    """Two parts of 3 x 2 tokens for each video, one for each picture."""
    names = [visual.files.write(bytes(6 * 4 * 128)) for _ in range(1 if picture.video is None else 2)]
    more = tuple((bytes([number + 1] * 32), name) for number, name in enumerate(names[1:]))
    times = () if picture.video is None else (0.25, 1.5)
    return PictureEncoded(picture.id, 3, 2, bytes(32), names[0], 0.5, False, more, times)


@pytest.fixture
def visual(visual: VisualServer) -> VisualServer:
    visual.answer = lambda picture: encoded(visual, picture)
    return visual


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"model": NAME, "max_tokens": 2, "messages": [{"role": "user", "content": [*parts]}]} | more


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def video(url: Any = URL, **more: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}} | more


def test_the_prompt(seeing: HttpServer, visual: VisualServer) -> None:
    """The times stand in the text before each two frames; the prompt's length counts all."""
    answer = seeing.post("/v1/chat/completions", chat(text("Look: "), video(), text(" What?")))
    assert answer.status_code == 200, answer.text
    (request,) = seeing.requests
    (message,) = visual.pictures
    assert (message.data, message.video, message.frames) == (b"a video", VideoSettings(), ())
    encode, rows = seeing.tokenizer.encode, [START, *[PAD] * 6, END]
    expected = [
        *encode("<|im_start|>user\nLook: <0.2 seconds>"),
        *rows,
        *encode("<1.5 seconds>"),
        *rows,
        *encode(" What?<|im_end|>\n<|im_start|>assistant\n"),
    ]
    assert tokens_of(request) == expected
    assert [(span.count, span.sha256[0]) for span in request.spans] == [(6, 0), (6, 1)]
    assert within(30, lambda: not visual.left)
    counted = seeing.post("/tokenize", {"model": NAME, "prompt": "x"})
    assert counted.status_code == 200
    shown = seeing.post("/apply-template", chat(text("Look: "), video())).json()["prompt"]
    assert "Look: <|vision_start|><|video_pad|><|vision_end|><|im_end|>" in shown


WRITTEN: dict[str, tuple[dict[str, Any], EncodePicture]] = {
    "a string": (
        {"type": "video_url", "video_url": URL},
        EncodePicture(0, b"a video", None, VideoSettings()),
    ),
    "no type": ({"video_url": {"url": URL}}, EncodePicture(0, b"a video", None, VideoSettings())),
    "Qwen's": ({"type": "video", "video": URL}, EncodePicture(0, b"a video", None, VideoSettings())),
    "transformers'": ({"type": "video", "url": URL}, EncodePicture(0, b"a video", None, VideoSettings())),
    "settings": (
        video(fps=0.5, max_frames=16),
        EncodePicture(0, b"a video", None, VideoSettings(0.5, 16)),
    ),
    "frames": (
        {"type": "video", "video": FRAME_URLS, "fps": 1},
        EncodePicture(0, b"", None, VideoSettings(1.0), (b"one", b"two")),
    ),
    "frames as parts": (
        {"type": "video", "video": [{"type": "image_url", "image_url": {"url": url}} for url in FRAME_URLS]},
        EncodePicture(0, b"", None, VideoSettings(), (b"one", b"two")),
    ),
    "vLLM's frames": (
        video(f"data:video/jpeg;base64,{','.join(FRAMES)}"),
        EncodePicture(0, b"", None, VideoSettings(), (b"one", b"two")),
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_forms(seeing: HttpServer, visual: VisualServer, name: str) -> None:
    part, expected = WRITTEN[name]
    answer = seeing.post("/v1/chat/completions", chat(text("a"), part))
    assert answer.status_code == 200, answer.text
    (found,) = visual.pictures
    assert (found.data, found.video, found.frames) == (expected.data, expected.video, expected.frames)


def test_beside_pictures_and_in_tool_results(seeing: HttpServer, visual: VisualServer) -> None:
    picture = {"type": "image_url", "image_url": {"url": FRAME_URLS[0]}}
    body = chat(video(), picture, text("a"))
    call = {"id": "c", "type": "function", "function": {"name": "film", "arguments": "{}"}}
    body["messages"] += [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [video()]},
    ]
    answer = seeing.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    assert [one.video is not None for one in visual.pictures] == [True, False, True]
    (request,) = seeing.requests
    assert len(request.spans) == 5


REFUSED = {
    "the video is not valid base64": video("data:video/mp4;base64,???"),
    "the video is empty": video("data:video/mp4;base64,"),
    "the video's URL is not data:video/...;base64,...; write it in this form": video("data:video/mp4,abc"),
    "the video must be a URL": {"type": "video_url", "video_url": {"url": 7}},
    "a video has 1 to 768 frames, not 0": {"type": "video", "video": []},
    "a video has 1 to 2 frames, not 3": {"type": "video", "video": [FRAME_URLS[0]] * 3, "max_frames": 2},
    # Too many frames are not read: these would be refused for what they are.
    "a video has 1 to 768 frames, not 769": {"type": "video", "video": [7] * 769},
    "a video has 1 to 768 frames, not 1000": video("data:video/jpeg;base64" + ",???" * 1000),
    "fps must be a number from 0.01 to 60": video(fps=0),
    "max_frames must be a number from 2 to 768": video(max_frames=1000),
    "the video's frame is not valid base64": video("data:video/jpeg;base64,/9j/,???"),
    "videos are not fetched from addresses": video("https://example.com/a.mp4"),
}


@pytest.mark.parametrize("cause", REFUSED)
def test_what_is_refused(seeing: HttpServer, visual: VisualServer, cause: str) -> None:
    answer = seeing.post("/v1/chat/completions", chat(text("a"), REFUSED[cause]))
    assert answer.status_code == 400
    assert cause in answer.json()["error"]["message"]
    assert not visual.pictures


def test_what_the_visual_server_refuses(seeing: HttpServer, visual: VisualServer) -> None:
    visual.answer = lambda picture: PictureRefused(picture.id, 400, "has no frames")
    answer = seeing.post("/v1/chat/completions", chat(video()))
    assert answer.status_code == 400
    assert "the video has no frames" in answer.json()["error"]["message"]


def test_a_model_that_reads_pictures_only() -> None:
    with seeing_server(model=str(GEMMA_MODEL), mmproj=str(GEMMA_TOWER)) as (seeing, visual):
        answer = seeing.post("/v1/chat/completions", chat(text("a"), video()))
        assert answer.status_code == 400
        assert "has a video, and this model's tower reads pictures only" in answer.json()["error"]["message"]
        assert not visual.pictures
        (card,) = seeing.get("/v1/models").json()["data"]
        assert card["architecture"]["input_modalities"] == ["text", "image"]
