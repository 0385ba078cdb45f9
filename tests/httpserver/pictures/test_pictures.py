"""Pictures in requests: what httpserver sends to the visual server, and what to the engine."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image

from moeserve.cli.bench.serve import main as bench_serve
from moeserve.cli.workload.shapes import WITH_PICTURES
from moeserve.messages.pictures import PictureRefused
from tests.support.pictures.picture_bodies import (
    BASE64,
    BEFORE,
    BEHIND,
    END,
    FILE,
    PAD,
    START,
    URL,
    chat,
    image,
    prompt_of,
    text,
)
from tests.support.pictures.visual_server import Answer, VisualServer, engine_sees, seeing_server
from tests.support.servers.engine_messages import ready_message
from tests.support.servers.http_harness import NAME, HttpServer, tokens_of
from tests.support.servers.waiting import within


def anthropic(source: Any) -> dict[str, Any]:
    return {"type": "image", "source": source}


def response_to(part: dict[str, Any]) -> dict[str, Any]:
    return {"model": NAME, "max_output_tokens": 2, "input": [{"role": "user", "content": [part]}]}


BLOCK = anthropic({"type": "base64", "media_type": "image/png", "data": BASE64})
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat(text(BEFORE), image(), text(BEHIND)),
    "/v1/messages": chat(text(BEFORE), BLOCK, text(BEHIND)),
    "/v1/responses": {
        "model": NAME,
        "max_output_tokens": 2,
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": BEFORE},
                    {"type": "input_image", "image_url": URL, "detail": "auto"},
                    {"type": "input_text", "text": BEHIND},
                ],
            }
        ],
    },
    "/api/chat": {
        "model": NAME,
        "stream": False,
        "options": {"num_predict": 2},
        "messages": [{"role": "user", "content": BEHIND, "images": [BASE64]}],
    },
    "/api/generate": {
        "model": NAME,
        "stream": False,
        "options": {"num_predict": 2},
        "prompt": BEHIND,
        "images": [BASE64],
    },
}


@pytest.mark.parametrize("path", REQUESTS)
def test_the_prompt(seeing: HttpServer, visual: VisualServer, path: str) -> None:
    answer = seeing.post(path, REQUESTS[path])
    assert answer.status_code == 200, answer.text
    (request,) = seeing.requests
    assert [one.data for one in visual.pictures] == [FILE]
    tokens = tokens_of(request)
    expected = prompt_of(seeing, "" if "/api/" in path else BEFORE)
    assert (
        tokens[: len(expected)] == expected
    )  # Anthropic's models think on request only: a template may say so
    (span,) = request.spans
    assert (tokens[span.start - 1], span.count, tokens[span.end]) == (START, 6, END)
    first = span.start
    assert np.frombuffer(span.positions, np.int32).reshape(3, 6).tolist() == [
        [first] * 6,
        [first, first, first + 1, first + 1, first + 2, first + 2],
        [first, first + 1] * 3,
    ]
    assert within(30, lambda: not visual.left)  # the request has ended


WRITTEN = {
    "capitals": f"DATA:IMAGE/PNG;BASE64,{BASE64}",
    "another type": f"data:image/jpeg;base64,{BASE64}",
    "a type that is none": f"data:image/*;base64,{BASE64}",
    "no type": f" data:;base64,{BASE64}",
    "a parameter": f"data:image/png;charset=utf-8; base64,{BASE64}",
    "lines": "data:image/png;base64," + "\r\n".join(BASE64[at : at + 76] for at in range(0, len(BASE64), 76)),
    "the URL's alphabet": "data:image/png;base64," + base64.urlsafe_b64encode(FILE).decode().rstrip("="),
    "percent-encoded": "data:image/png;base64," + quote(BASE64, safe=""),
    "no padding": URL.rstrip("="),  # LM Studio takes it (openedai-vision, issue 4)
    "no scheme": f"image/jpg;base64,{BASE64}",  # litellm, issue 1427
    "no prefix": BASE64,  # claude-code-router, pull request 1690
    "the prefix twice": f"data:image/png;base64,{URL}",  # senpi, issue 1260; freebuff, pull request 978
}


@pytest.mark.parametrize("name", WRITTEN)
def test_how_clients_write_a_picture(seeing: HttpServer, visual: VisualServer, name: str) -> None:
    assert "+" in BASE64
    assert "/" in BASE64
    written = WRITTEN[name]
    answers = [
        seeing.post("/v1/chat/completions", chat(image(written))),
        seeing.post(
            "/v1/chat/completions", chat({"type": "image_url", "image_url": written, "detail": None})
        ),
        seeing.post(
            "/v1/responses", response_to({"type": "input_image", "image_url": written, "detail": None})
        ),
        seeing.post(
            "/v1/messages", chat(anthropic({"type": "base64", "media_type": "image/jpeg", "data": written}))
        ),
        seeing.post("/api/generate", REQUESTS["/api/generate"] | {"images": [written]}),
    ]
    assert [answer.status_code for answer in answers] == [200] * 5
    assert [one.data for one in visual.pictures] == [FILE] * 5


def test_an_address_in_ollamas_images(seeing: HttpServer, visual: VisualServer) -> None:
    """litellm passes it on (issue 30313)."""
    body = REQUESTS["/api/generate"] | {"images": ["https://example.com/a.png"]}
    answer = seeing.post("/api/generate", body)
    assert answer.status_code == 400
    assert "pictures are not fetched from addresses" in answer.json()["error"]


def test_empty_texts_beside_a_picture(seeing: HttpServer, visual: VisualServer) -> None:
    """The prompt is that of the picture alone."""
    for parts in ([image()], [text(""), image(), text("")]):
        assert seeing.post("/v1/chat/completions", chat(*parts)).status_code == 200
    alone, beside = (tokens_of(request) for request in seeing.requests)
    assert alone == beside


@pytest.mark.slow
def test_encoding_counts_as_answering() -> None:
    with seeing_server(request_timeout=2.0) as (seeing, visual):
        visual.answer = lambda picture: None
        answer = seeing.post("/v1/chat/completions", chat(image()))
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")
        assert seeing.requests == []


def test_two_pictures_and_what_is_behind(seeing: HttpServer, visual: VisualServer) -> None:
    """Positions behind a picture go on at its longer side's end."""
    answer = seeing.post("/v1/chat/completions", chat(image(), text("and"), image(detail="low")))
    assert answer.status_code == 200
    assert [one.max_tokens for one in visual.pictures] == [None, 256]
    _, second = seeing.requests[0].spans
    rotated = np.frombuffer(second.positions, np.int32)
    assert rotated[0] == second.start - 6 + 3
    assert answer.json()["usage"]["prompt_tokens"] == len(tokens_of(seeing.requests[0]))


def test_placeholders_that_a_client_spells_are_no_picture(seeing: HttpServer, visual: VisualServer) -> None:
    spelled = "<|vision_start|><|image_pad|><|vision_end|>"
    answer = seeing.post("/v1/chat/completions", chat(text(spelled), image(), text(spelled)))
    assert answer.status_code == 200
    (request,) = seeing.requests
    (span,) = request.spans
    assert tokens_of(request)[span.start : span.end] == [PAD] * 6
    assert len(visual.pictures) == 1


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (image("https://example.com/a.png"), "pictures are not fetched from addresses"),
        (image("ftp://example.com/" + "a" * 9000), "URL is too long"),
        (image("data:image/png,abc"), "data:image/...;base64,..."),
        (image("data:image/png;base64,a*b"), "valid base64"),
        (image("data:image/png;base64,"), "is empty"),
        (image(detail="tiny"), "detail must be"),
        ({"type": "image_url", "image_url": 5}, "must be a string"),
        ({"type": "image"}, "must be a string"),
        ({"type": "image", "image": "file:///etc/passwd"}, "pictures are not fetched from addresses"),
        ({"type": "input_audio", "input_audio": {}}, "'input_audio' is not supported"),
    ],
)
def test_what_is_no_picture(seeing: HttpServer, visual: VisualServer, part: Any, words: str) -> None:
    answer = seeing.post("/v1/chat/completions", chat(part))
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert visual.pictures == []


def test_pictures_of_assistants_and_systems(seeing: HttpServer, visual: VisualServer) -> None:
    """A question about a picture that another model has drawn (openai/openai-node, issue 1030). They were refused."""
    turns = [{"role": "user", "content": "Draw."}, {"role": "assistant", "content": [image()]}]
    messages = [*turns, {"role": "user", "content": "Describe it."}]
    answer = seeing.post("/v1/chat/completions", chat() | {"messages": messages})
    assert answer.status_code == 200, answer.text
    assert [one.data for one in visual.pictures] == [FILE]
    written = seeing.tokenizer.decode(tokens_of(seeing.requests[-1]), False)
    assert "assistant\n<|vision_start|>" in written
    messages = [{"role": "system", "content": [image()]}, {"role": "user", "content": "Hi"}]
    answer = seeing.post("/v1/chat/completions", chat() | {"messages": messages})
    assert answer.status_code == 400
    assert "messages of role system cannot contain pictures" in answer.json()["error"]["message"]


def test_a_picture_that_a_tool_gives(seeing: HttpServer, visual: VisualServer) -> None:
    """As agents send screenshots."""
    messages = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "a", "content": [text("Here:"), BLOCK]}],
        },
    ]
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    body = {"model": NAME, "max_tokens": 2, "messages": messages, "tools": tools}
    assert seeing.post("/v1/messages", body).status_code == 200
    (request,) = seeing.requests
    (span,) = request.spans
    tokens = tokens_of(request)
    before = seeing.tokenizer.decode(tokens[: span.start - 1], False)
    assert before.endswith("<tool_response>\nHere:")
    counted = {name: value for name, value in body.items() if name != "max_tokens"}
    assert seeing.post("/v1/messages/count_tokens", counted).json() == {"input_tokens": len(tokens)}
    assert within(30, lambda: not visual.left)


def test_a_stored_conversation_has_its_pictures(seeing: HttpServer, visual: VisualServer) -> None:
    first = seeing.post("/v1/responses", REQUESTS["/v1/responses"]).json()
    more = {"model": NAME, "max_output_tokens": 2, "previous_response_id": first["id"], "input": "And?"}
    assert seeing.post("/v1/responses", more).status_code == 200
    assert [one.data for one in visual.pictures] == [FILE, FILE]
    (before,), (behind,) = (request.spans for request in seeing.requests)
    assert (before.start, before.positions) == (behind.start, behind.positions)


def test_what_the_visual_server_refuses(seeing: HttpServer, visual: VisualServer) -> None:
    def refusing(status: int) -> Answer:
        return lambda picture: PictureRefused(picture.id, status, "is in no known format")

    for status in (400, 503):
        visual.answer = refusing(status)
        answer = seeing.post("/v1/chat/completions", chat(image()))
        assert answer.status_code == status
        assert "the picture is in no known format" in answer.json()["error"]["message"]
    assert seeing.requests == []


def test_a_body_that_a_text_would_not_have(seeing: HttpServer, visual: VisualServer) -> None:
    answer = seeing.post("/v1/chat/completions", chat(image("data:image/png;base64," + "A" * (6 << 20))))
    assert answer.status_code == 200
    assert len(visual.pictures[0].data) == (6 << 20) * 3 // 4


def test_bench_serve_sends_pictures(
    seeing: HttpServer, visual: VisualServer, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--num-prompts=3", "--num-turns=2", "--input-len=9", "--output-len=2", "--disable-tqdm"]
    pictures = [f"--dataset-name={WITH_PICTURES}", "--random-mm-base-items-per-request=2"]
    pictures.append("--random-mm-image-size=48x32")
    assert bench_serve([f"--url={seeing.url}", "--backend=openai-chat", *options, *pictures]) == 0
    assert "chat messages, 2 pictures of 48x32" in capsys.readouterr().out
    files = {one.data for one in visual.pictures}
    assert len(files) == 2 * 3
    assert {Image.open(io.BytesIO(file)).size for file in files} == {(48, 32)}
    # Two requests find the length of a word; the second turn has the first one's pictures, too.
    assert sorted(len(request.spans) for request in seeing.requests) == [0, 0, 2, 2, 4]


def test_many(seeing: HttpServer, visual: VisualServer) -> None:
    answer = seeing.post("/v1/chat/completions", chat(*[image()] * 65))
    assert answer.status_code == 400
    assert "65 pictures; at most 64" in answer.json()["error"]["message"]


def test_what_says_so(seeing: HttpServer, visual: VisualServer) -> None:
    assert seeing.get("/props").json()["modalities"]["vision"] is True
    assert "vision" in seeing.post("/api/show", {"model": NAME}).json()["capabilities"]
    (card,) = seeing.get("/v1/models").json()["data"]
    assert card["architecture"]["input_modalities"] == ["text", "image", "video"]
    applied = seeing.post("/apply-template", chat(text("a"), image())).json()["prompt"]
    assert "user\na<__media__><|im_end|>" in applied
    messages = chat(text(BEFORE), image(), text(BEHIND))["messages"]
    found = seeing.post("/tokenize", {"model": NAME, "messages": messages}).json()
    assert (found["tokens"], found["count"]) == (prompt_of(seeing), len(prompt_of(seeing)))
    refused = seeing.post("/tokenize", {"model": NAME, "messages": messages, "add_special_tokens": True})
    assert refused.status_code == 400
    tools = [{"type": "function", "function": {"name": "look"}}]
    with_tools = seeing.post("/tokenize", {"model": NAME, "messages": messages, "tools": tools}).json()
    assert with_tools["count"] > found["count"]
    before = seeing.metric("pictures_total")
    seeing.post("/v1/chat/completions", chat(image(), image()))
    assert seeing.metric("pictures_total") == before + 2
    assert seeing.metric("picture_seconds_total") > 0


@pytest.mark.parametrize("is_of_tool", [False, True])
def test_a_document_with_pictures(seeing: HttpServer, visual: VisualServer, *, is_of_tool: bool) -> None:
    """Anthropic's; it was refused."""
    content = [text("Page 1"), BLOCK, text("Page 2")]
    document = {"type": "document", "title": "A book", "source": {"type": "content", "content": content}}
    messages = [{"role": "user", "content": [document, text("What is on it?")]}]
    if is_of_tool:
        call = {"type": "tool_use", "id": "a", "name": "read", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "a", "content": [document]}
        messages = [
            {"role": "user", "content": "Read it."},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
    answer = seeing.post("/v1/messages", {"model": NAME, "max_tokens": 2, "messages": messages})
    assert answer.status_code == 200, answer.text
    assert [one.data for one in visual.pictures] == [FILE]
    (span,) = seeing.requests[-1].spans
    written = seeing.tokenizer.decode(tokens_of(seeing.requests[-1])[: span.start], False)
    assert written.endswith("<document>\n<title>A book</title>\nPage 1<|vision_start|>")


def multimodal(words: str, *pictures: str, **more: Any) -> dict[str, Any]:
    return {"n_predict": 2, "prompt": {"prompt_string": words, "multimodal_data": [*pictures]}} | more


def test_plain_prompts_of_llama_server(seeing: HttpServer, visual: VisualServer) -> None:
    """What /apply-template writes, with the pictures beside it, is the conversation's prompt."""
    marker = seeing.get("/props").json()["media_marker"]
    words = seeing.post("/apply-template", chat(text(BEFORE), image(), text(BEHIND))).json()["prompt"]
    assert words.count(marker) == 1
    for data in (BASE64, URL):
        answer = seeing.post("/completion", multimodal(words, data))
        assert answer.status_code == 200, answer.text
        assert answer.json()["prompt"] == words
        assert tokens_of(seeing.requests[-1]) == prompt_of(seeing)
        (span,) = seeing.requests[-1].spans
        assert span.count == 6
    assert [one.data for one in visual.pictures] == [FILE] * 2
    answer = seeing.post("/completion", multimodal("Without pictures."))
    assert answer.status_code == 200
    assert tokens_of(seeing.requests[-1]) == seeing.tokenizer.encode("Without pictures.")
    # Without multimodal_data the marker is a text like any other.
    assert seeing.post("/completion", {"n_predict": 2, "prompt": marker}).status_code == 200


def test_plain_prompts_whose_pictures_do_not_fit(seeing: HttpServer) -> None:
    for body, message in (
        (multimodal("no marker", BASE64), "0 markers <__media__>, and multimodal_data 1 pictures"),
        (multimodal("<__media__>" * 2, BASE64), "2 markers <__media__>, and multimodal_data 1 pictures"),
        (multimodal("<__media__>", "?"), "valid base64"),
        (multimodal("<__media__>" * 65, *[BASE64] * 65), "at most 64 items"),
    ):
        answer = seeing.post("/completion", body)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]


def test_a_server_without_a_tower_refuses(request: pytest.FixtureRequest) -> None:
    with_none: HttpServer = request.getfixturevalue("plain")
    for path, body in REQUESTS.items():
        answer = with_none.post(path, body)
        assert answer.status_code == 400, path
        assert "it runs without a vision tower (--mmproj)" in answer.text
    assert with_none.requests == []


@pytest.fixture
def plain() -> Iterator[HttpServer]:
    from tests.support.servers.http_harness import http_server

    with http_server() as seeing:
        yield seeing


def test_an_engine_that_takes_none(seeing: HttpServer, visual: VisualServer) -> None:
    ready = ready_message(seeing.tokenizer.vocabulary.size)
    seeing.send(ready)
    assert within(30, lambda: seeing.post("/v1/chat/completions", chat(image())).status_code == 400)
    refused = seeing.post("/v1/chat/completions", chat(image()))
    assert "neither several GPUs nor a remote worker compute so far" in refused.json()["error"]["message"]
    engine_sees(seeing)
    assert within(30, lambda: seeing.post("/v1/chat/completions", chat(image())).status_code == 200)
