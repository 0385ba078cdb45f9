"""Gemma 4's pictures through a whole server: transformers' answers, in each API, and a conversation's second turn."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.pictures.picture_fixture import (
    FIRST_TOKEN,
    GEMMA_MODEL,
    GEMMA_TOKENS,
    PICTURES,
    TOWER,
    check_first_token,
    gemma_picture_cases,
)
from tests.support.servers.server import Server, clean_environment, command, common_flags, running_server
from tests.support.servers.waiting import free_port

MODEL = GEMMA_MODEL.stem
BEFORE, BEHIND = "Look at this: ", " What does the keeper see?"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--mmproj", "auto", "--image-max-tokens", str(GEMMA_TOKENS), "--max-total-tokens", "4096")
    with running_server(GEMMA_MODEL, *flags) as running:
        yield running


def data_of(name: str) -> str:
    return base64.b64encode(gemma_picture_cases()[name].path.read_bytes()).decode()


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data_of(name)}"}}


def post(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{server.base_url}{path}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def chat(server: Server, *messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """messages: the contents of users and assistants in turn."""
    roles = ["user", "assistant"] * len(messages)
    said = [{"role": role, "content": content} for role, content in zip(roles, messages, strict=False)]
    body = {"messages": said, "max_tokens": 8, "temperature": 0} | more
    return post(server, "/v1/chat/completions", body)


@pytest.mark.parametrize("name", PICTURES)
def test_the_first_token_is_transformers(server: Server, name: str) -> None:
    found = chat(server, [text(BEFORE), image(name), text(BEHIND)], **FIRST_TOKEN)
    check_first_token(found, gemma_picture_cases()[name])


def test_the_same_answer_in_each_api(server: Server) -> None:
    name = "landscape"
    expected = chat(server, [image(name), text(BEHIND)])["choices"][0]["message"]["content"]
    # What Anthropic's API asks for, where a request does not say that the model is to think.
    switch = {"enable_thinking": False}
    without = chat(server, [image(name), text(BEHIND)], chat_template_kwargs=switch)
    silent = without["choices"][0]["message"]["content"]
    source = {"type": "base64", "media_type": "image/png", "data": data_of(name)}
    content = [{"type": "image", "source": source}, text(BEHIND)]
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    anthropic = {"model": MODEL, "max_tokens": 8, "temperature": 0, "messages": messages}
    found = post(server, "/v1/messages", anthropic)
    assert "".join(part.get("text", "") for part in found["content"]) == silent
    counted = {"model": MODEL, "messages": messages}
    usage = found["usage"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    assert post(server, "/v1/messages/count_tokens", counted)["input_tokens"] == prompt
    ollama: dict[str, Any] = {
        "model": MODEL,
        "stream": False,
        "options": {"num_predict": 8, "temperature": 0},
        "messages": [{"role": "user", "content": BEHIND, "images": [data_of(name)]}],
    }
    assert post(server, "/api/chat", ollama)["message"]["content"] == expected


def test_a_second_turn(server: Server) -> None:
    """The picture is neither encoded nor computed again."""
    first = [text(BEFORE), image("wide"), text(BEHIND)]
    answer = chat(server, first)["choices"][0]["message"]["content"]
    second = chat(server, first, [text(answer)], [text("And what does it hear?")])
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= len(gemma_picture_cases()["wide"].tokens) - 8
    alone = chat(server, first, [text(answer)], [text("And what does it hear?")], cache_salt="another")
    assert alone["choices"] == second["choices"]
    assert server.metrics()["moeserve:picture_cache_hits_total"] >= 2


def test_what_says_that_it_sees(server: Server) -> None:
    (model,) = httpx.get(f"{server.base_url}/v1/models", timeout=60).json()["data"]
    assert "image" in str(model)
    assert httpx.get(f"{server.base_url}/props", timeout=60).json()["modalities"]["vision"] is True
    assert "vision" in post(server, "/api/show", {"model": MODEL})["capabilities"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--mmproj", str(TOWER)), "another family's tower than gemma4"),
        (
            ("--mmproj", "auto", "--image-min-tokens", "16"),
            "--image-min-tokens: Gemma 4's pictures are enlarged",
        ),
    ],
    ids=["another family's tower", "a bound that it has not"],
)
def test_what_ends_the_start(flags: tuple[str, ...], words: str) -> None:
    done = subprocess.run(
        [*command(GEMMA_MODEL, *flags, "--max-total-tokens", "512", "--port", str(free_port())), *common_flags()],
        env=clean_environment(), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert words in done.stderr
