"""Every program in the guides for users of the API, run as it stands against a real server.

Those of the SDKs that the tests have anyway run always. The others need MOESERVE_CLIENTS, a folder with `venv` and
`node_modules` that `make test-clients` makes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.servers.server import GREEDY, REPOSITORY, Server, running_server

GUIDES = (
    "connect-a-client.md",
    "answer-in-the-background.md",
    "get-structured-output.md",
    "call-tools.md",
    "limit-reasoning.md",
)
PAGES = "".join((REPOSITORY / "docs" / "how-to" / name).read_text() for name in GUIDES)
CLIENTS = os.environ.get("MOESERVE_CLIENTS")
PROGRAMS = [
    (heading, language, program)
    for heading, section in re.findall(r"^## (.*?)\n(.*?)(?=^##? |\Z)", PAGES, re.MULTILINE | re.DOTALL)
    for language, program in re.findall(r"^```(sh|python|js)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
]


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    """A server whose answers are not sampled: a program that prints nothing would then be a fault of the page."""
    with running_server(tiny_model, *GREEDY) as running:
        yield running


def test_the_pages_are_read() -> None:
    assert {language for _, language, _ in PROGRAMS} == {"sh", "python", "js"}
    assert len(PROGRAMS) >= 18


@pytest.mark.parametrize(
    ("heading", "language", "program"),
    PROGRAMS,
    ids=[f"{one[0]}-{index}" for index, one in enumerate(PROGRAMS)],
)
def test_program(server: Server, tmp_path: Path, heading: str, language: str, program: str) -> None:
    (model,) = httpx.get(server.base_url + "/v1/models").json()["data"]
    program = program.replace("http://localhost:8000", server.base_url).replace("qwen3-30b-a3b", model["id"])
    program = program.replace("1024", "100")  # room for a thought, which the tests' model does not end
    command = {"sh": shell, "python": python, "js": node}[language](tmp_path, program)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert '"error":' not in done.stdout


def environment() -> dict[str, str]:
    """Without keys, URLs and proxies of whoever runs the tests."""
    return {
        name: value
        for name, value in os.environ.items()
        if not re.match(r"OPENAI|ANTHROPIC|LANG(CHAIN|SMITH)|(https?|all)_proxy", name, re.IGNORECASE)
    }


def shell(folder: Path, program: str) -> list[str]:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    return ["bash", "-euc", program]


def python(folder: Path, program: str) -> list[str]:
    (folder / "program.py").write_text(program)
    interpreter = sys.executable
    if re.search(r"langchain|llama_index", program):
        if CLIENTS is None:
            pytest.skip("run make test-clients")
        interpreter = f"{CLIENTS}/venv/bin/python"
    return [interpreter, str(folder / "program.py")]


def node(folder: Path, program: str) -> list[str]:
    if CLIENTS is None or shutil.which("node") is None:
        pytest.skip("run make test-clients, with node installed")
    (folder / "node_modules").symlink_to(Path(CLIENTS).resolve() / "node_modules")
    (folder / "program.mjs").write_text(program)
    return ["node", str(folder / "program.mjs")]
