"""Clients as their registries have them, unmodified, with a picture: its file reaches the visual server as it is.

The engine and the tower are scripted. As `test_real_clients`, they need what `make test-clients` installs.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clients.real_clients import CLIENTS, CONTEXT, call, run_agent, run_python, script
from tests.support.pictures.picture_fixture import picture_cases
from tests.support.pictures.visual_server import VisualServer, seeing_server
from tests.support.servers.http_harness import HttpServer, say

FILE = picture_cases()["square"].path
PROGRAMS = [
    *("picture_openai chat", "picture_openai responses"),
    *("picture_anthropic message", "picture_anthropic result"),
    *("picture_ollama chat", "picture_ollama prompt"),
    *("picture_litellm hosted_vllm", "picture_litellm ollama_chat"),
    *("picture_langchain chat", "picture_langchain responses", "picture_langchain anthropic"),
    "picture_llama_index",
]

pytestmark = pytest.mark.skipif(CLIENTS is None, reason="run make test-clients")


@pytest.fixture(scope="module")
def world() -> Iterator[tuple[HttpServer, VisualServer]]:
    with seeing_server(context=CONTEXT) as both:
        yield both


@pytest.mark.parametrize("program", PROGRAMS)
def test_python(world: tuple[HttpServer, VisualServer], tmp_path: Path, program: str) -> None:
    server, visual = world
    visual.pictures.clear()
    shutil.copy(FILE, tmp_path / "sign.png")
    script(server, say("It says stop."))
    assert "It says stop." in run_python(server, tmp_path, program)
    assert {picture.data for picture in visual.pictures} == {FILE.read_bytes()}
    (request,) = server.requests
    assert len(request.spans) == 1


def test_claude_code(world: tuple[HttpServer, VisualServer], tmp_path: Path) -> None:
    """It reads a screenshot with its own tool, whose result has the picture."""
    server, visual = world
    visual.pictures.clear()
    shutil.copy(FILE, tmp_path / "sign.png")
    script(server, call("Read", {"file_path": str(tmp_path / "sign.png")}), say("It says stop."))
    said = run_agent(server, tmp_path, "claude", "-p", "What does sign.png say?", "--allowedTools", "Read")
    assert "It says stop." in said
    assert len(visual.pictures) == 1
    assert len(server.requests[-1].spans) == 1


@pytest.mark.parametrize("how", ["named in the prompt", "read by its tool"])
def test_cline(world: tuple[HttpServer, VisualServer], tmp_path: Path, how: str) -> None:
    """A path in what its user types becomes a picture; its tool gives one in its result."""
    server, visual = world
    visual.pictures.clear()
    path = shutil.copy(FILE, tmp_path / "sign.png")
    if how == "named in the prompt":
        script(server, *[say("It says stop.")] * 3)
        prompt = f"What does @{path} say?"
    else:
        read = call("read_files", {"files": [{"path": str(path)}]})
        script(server, read, *[say("It says stop.")] * 3)
        prompt = "What does the sign say?"
    said = run_agent(server, tmp_path, "cline", "--json", "--auto-approve", "true", prompt)
    assert "It says stop." in said
    assert {picture.data for picture in visual.pictures} == {FILE.read_bytes()}
    assert len(server.requests[-1].spans) == 1
