"""`moeserve launch AGENT` at a pseudo-terminal, with the agents that `make test-clients` installs: two calls of a tool
and an answer. The engine is scripted, and the server wants a key."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from moeserve.messages.schema import GenerateRequest
from tests.support.chats.scripted_answers import prompt_of
from tests.support.clients.real_clients import CLIENTS, CONTEXT, TIMEOUT_S, binary, call, search_path
from tests.support.clients.terminal import Terminal
from tests.support.servers.http_harness import HttpServer, http_server, say, tokens_of
from tests.support.servers.server import REPOSITORY, clean_environment, imports_from

KEY = "sk-of-the-test"
SAID = "It rains in Paris."
SHELL = {"command": "echo Rain.", "description": "Says rain."}
# What the agent's user types behind --, the tool that the model calls, and its arguments.
TASKS: dict[str, tuple[list[str], str, dict[str, object]]] = {
    "claude": (["-p", "Go.", "--allowedTools", "Bash"], "Bash", {**SHELL}),
    "codex": (
        ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "Go."],
        "exec_command",
        {"cmd": "echo Rain."},
    ),
    "qwen": (["-p", "Go.", "-y"], "run_shell_command", {**SHELL, "is_background": False}),
    "opencode": (["run", "Go."], "bash", {**SHELL}),
    "cline": (
        ["--json", "--auto-approve", "true", "Go on."],
        "run_commands",
        {"commands": ["echo Rain."]},
    ),
}

pytestmark = pytest.mark.skipif(CLIENTS is None, reason="run make test-clients")


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with http_server(context=CONTEXT, api_key=[KEY]) as running:
        yield running


@pytest.mark.parametrize("agent", TASKS)
def test_a_task_of_three_turns(server: HttpServer, tmp_path: Path, agent: str) -> None:
    arguments, tool, given = TASKS[agent]
    binary(agent)  # skips the test where the agent is not installed
    server.requests.clear()

    def answer(one: HttpServer, request: GenerateRequest) -> None:
        """Agents also ask beside the conversation, such as for its title."""
        prompt = one.tokenizer.decode(tokens_of(request), skip_special=False)
        must_call = f'"name": "{tool}"' in prompt and prompt.count("<tool_response>") < 2
        (call(tool, given) if must_call else say(SAID))(one, request)

    server.answer = answer
    (tmp_path / "codex").mkdir()
    settings = {"permission": {"bash": "allow"}, "autoupdate": False}
    (tmp_path / "opencode.json").write_text(json.dumps(settings))  # the user's own, which stay
    own = {"HOME": str(tmp_path), "CODEX_HOME": str(tmp_path / "codex"), "LANG": "C.UTF-8"}
    path = f"{Path(str(CLIENTS)).resolve()}/node_modules/.bin:{search_path()}"
    flags = ["--port", str(urlsplit(server.url).port)]
    # As a shell in the project's folder would start it.
    command = [
        "/bin/sh",
        "-c",
        f'cd {tmp_path} && exec "$@"',
        "sh",
        sys.executable,
        "-m",
        "moeserve",
        "launch",
    ]
    environment = (
        clean_environment() | imports_from(REPOSITORY) | own | {"PATH": path, "MOESERVE_API_KEY": KEY}
    )
    with Terminal([*command, agent, *flags, "--", *arguments], environment) as terminal:
        code = terminal.wait(TIMEOUT_S)
    assert code == 0, terminal.seen
    assert SAID in terminal.seen
    prompt = prompt_of(server)
    assert prompt.count("<tool_response>") == 2
    assert prompt.count("Rain.") >= 4, "both calls and both results"
    assert not os.path.exists(tmp_path / "codex" / "config.toml"), "its settings are the user's"
