"""Open WebUI as PyPI has it, unmodified, over OpenAI's API and over Ollama's: its list of models, an answer with a
thought as its page asks for it, the title that it asks for afterwards, and a picture that its page uploads.

It needs MOESERVE_CLIENTS, which `make test-clients` makes. The engine is scripted.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.chats.scripted_answers import prompt_of
from tests.support.pictures.picture_fixture import picture_cases
from tests.support.pictures.visual_server import VisualServer, seeing_server
from tests.support.servers.http_harness import NAME, HttpServer, say
from tests.support.servers.waiting import free_port, within

CLIENTS = os.environ.get("MOESERVE_CLIENTS")
STARTS_IN_S = 240.0  # imports of some 300 packages
# No account, no download of models for its documents and its speech, no question to its maker.
SETTINGS = {
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "a key of a test, long enough for its tokens",
    "OFFLINE_MODE": "true",
    "RAG_EMBEDDING_ENGINE": "openai",
    "AUDIO_STT_ENGINE": "openai",
}
ANSWER = say("<think>", "\nLet me", " see.\n", "</think>", "\n\nIt rains", " in Paris.")

pytestmark = pytest.mark.skipif(CLIENTS is None, reason="run make test-clients")


@pytest.fixture(scope="module", params=["openai", "ollama"])
def world(
    request: pytest.FixtureRequest, tmp_path_factory: Any
) -> Iterator[tuple[HttpServer, VisualServer, httpx.Client]]:
    """A server that sees, and Open WebUI in front of it as its page talks to it."""
    folder, port = tmp_path_factory.mktemp("open-webui"), free_port()
    with seeing_server(context=1 << 17) as (server, visual):
        over_ollama = request.param == "ollama"
        address = (
            {"OLLAMA_BASE_URL": server.url} if over_ollama else {"OPENAI_API_BASE_URL": server.url + "/v1"}
        )
        chosen = {"ENABLE_OLLAMA_API": str(over_ollama), "ENABLE_OPENAI_API": str(not over_ollama)}
        own = {
            "DATA_DIR": str(folder),
            "HOME": str(folder),
            "PATH": os.environ["PATH"],
            "OPENAI_API_KEY": "none",
        }
        program = Path(str(CLIENTS)).resolve() / "venv-open-webui" / "bin" / "open-webui"
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [program, "serve", "--host", "127.0.0.1", "--port", str(port)],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=SETTINGS | address | chosen | own,
            )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                assert within(STARTS_IN_S, lambda: answers(client)), (folder / "log").read_text()[-3000:]
                signed_in = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()
                client.headers["Authorization"] = f"Bearer {signed_in['token']}"
                yield server, visual, client
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def page(world: tuple[HttpServer, VisualServer, httpx.Client]) -> tuple[HttpServer, httpx.Client]:
    server, _, client = world
    return server, client


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def ask(client: httpx.Client, *messages: Any) -> tuple[str, str]:
    """The thought and the text of a streamed answer to a conversation."""
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
    body = {"model": NAME, "messages": turns, "stream": True}
    answer = client.post("/api/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for line in lines for choice in json.loads(line).get("choices", ())]
    thought = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    return thought, "".join(delta.get("content") or "" for delta in deltas)


def test_the_model_is_listed(page: tuple[HttpServer, httpx.Client]) -> None:
    _, client = page
    assert [model["id"] for model in client.get("/api/models").json()["data"]] == [NAME]


def test_two_turns(page: tuple[HttpServer, httpx.Client]) -> None:
    server, client = page
    server.answer = ANSWER
    thought, text = ask(client, "How is the weather?")
    assert (thought.strip(), text.strip()) == ("Let me see.", "It rains in Paris.")
    thought, text = ask(client, "How is the weather?", text, "And tomorrow?")
    assert text.strip() == "It rains in Paris."
    prompt = prompt_of(server)
    assert (
        prompt.index("How is the weather?")
        < prompt.index("It rains in Paris.")
        < prompt.index("And tomorrow?")
    )


def test_a_picture(world: tuple[HttpServer, VisualServer, httpx.Client]) -> None:
    """Its page uploads the file, and names it in the message and in those behind it."""
    server, visual, client = world
    server.answer = ANSWER
    visual.pictures.clear()
    file = picture_cases()["square"].path
    uploaded = client.post(
        "/api/v1/files/",
        params={"process": "false"},
        files={"file": (file.name, file.read_bytes(), "image/png")},
    )
    assert uploaded.status_code == 200, uploaded.text
    shown = {"type": "image_url", "image_url": {"url": uploaded.json()["id"]}}
    message = [{"type": "text", "text": "What does it say?"}, shown]
    _, text = ask(client, message)
    assert text.strip() == "It rains in Paris."
    ask(client, message, text, "And below?")
    assert [one.data for one in visual.pictures] == [file.read_bytes()] * 2
    assert [len(request.spans) for request in server.requests[-2:]] == [1, 1]


def test_a_title(page: tuple[HttpServer, httpx.Client]) -> None:
    server, client = page
    server.answer = say('{"title": "Rain in Paris"}')
    turns = [
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", "content": "It rains."},
    ]
    answer = client.post("/api/v1/tasks/title/completions", json={"model": NAME, "messages": turns})
    assert answer.status_code == 200, answer.text
    assert "Rain in Paris" in answer.json()["choices"][0]["message"]["content"]
    assert "How is the weather?" in prompt_of(server)
