"""Clients as their registries have them, unmodified, over three turns with tools: two calls and an answer.

The engine is scripted, so that what they are answered is what agents live on; tests of the real engine are elsewhere.
They need MOESERVE_CLIENTS, a folder with environments (`venv`, `venv-openai3`, ...) and `node_modules` that
`make test-clients` makes: some clients want version 2 of OpenAI's library, others version 3.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from moeserve.messages.schema import GenerateRequest
from tests.support.chats.scripted_answers import prompt_of
from tests.support.clients.real_clients import (
    CLIENTS,
    CONTEXT,
    PROGRAMS,
    call,
    run,
    run_agent,
    run_python,
    script,
    search_path,
)
from tests.support.servers.http_harness import NAME, Answer, HttpServer, http_server, say, tokens_of

PARIS: dict[str, object] = {"city": "Paris"}
PYTHON = [
    *(
        "openai_chat",
        "openai_responses",
        "anthropic_runner",
        "litellm_chat",
        "litellm_messages",
        "ollama_chat",
    ),
    *("langchain_chat chat", "langchain_chat responses", "langchain_chat anthropic"),
]
OPENAI_3 = [
    *("openai_chat", "openai_responses"),
    *("pydantic_ai_agent chat", "pydantic_ai_agent responses", "pydantic_ai_agent anthropic"),
]
OLLAMA = ["litellm_ollama ollama_chat", "llama_index_ollama tools", "llm_with_ollama tools"]
AGENTS = [
    *("openai_agents chat", "openai_agents responses"),
    *("langchain_agent chat", "langchain_agent responses", "langchain_agent anthropic"),
    *("agno_agent vllm", "agno_agent responses", "agno_agent anthropic"),
    *("ag2_agent chat", "ag2_agent responses"),
    *("agent_framework_agent chat", "agent_framework_agent responses"),
    *("haystack_agent chat", "haystack_agent responses"),
    *("inspect_task chat", "inspect_task responses", "inspect_task anthropic"),
    "google_adk_agent",
]
NODE = [
    *("openai_node", "openai_node_responses", "anthropic_node", "ollama_node"),
    *("vercel_ai chat", "vercel_ai responses", "vercel_ai anthropic"),
    *("openai_agents chat", "openai_agents responses"),
    *("langchain_agent chat", "langchain_agent responses", "langchain_agent anthropic"),
    "mastra_agent",
    *("tanstack_ai chat", "tanstack_ai responses"),
]

pytestmark = pytest.mark.skipif(CLIENTS is None, reason="run make test-clients")


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with http_server(context=CONTEXT) as running:
        yield running


def script_calls(server: HttpServer, name: str, arguments: dict[str, object]) -> None:
    """The server calls the tool in two turns, and then answers."""
    script(server, *[call(name, arguments)] * 2, say("It rains in Paris."))


def took_three_turns(server: HttpServer, said: str) -> None:
    assert "It rains in Paris." in said
    assert len(server.requests) == 3
    assert prompt_of(server).count("<tool_response>\nRain.\n</tool_response>") == 2


@pytest.mark.parametrize("program", PYTHON)
def test_python(server: HttpServer, tmp_path: Path, program: str) -> None:
    script_calls(server, "weather", PARIS)
    took_three_turns(server, run_python(server, tmp_path, program))


@pytest.mark.parametrize("program", OPENAI_3)
def test_python_with_version_3_of_openais_library(server: HttpServer, tmp_path: Path, program: str) -> None:
    script_calls(server, "weather", PARIS)
    took_three_turns(server, run_python(server, tmp_path, program, "venv-openai3"))


@pytest.mark.parametrize("program", OLLAMA)
def test_python_over_ollamas_api(server: HttpServer, tmp_path: Path, program: str) -> None:
    script_calls(server, "weather", PARIS)
    took_three_turns(server, run_python(server, tmp_path, program, "venv-ollama"))


def test_litellms_older_provider_for_ollama(server: HttpServer, tmp_path: Path) -> None:
    """It asks /api/generate, and reads a text."""
    script(server, *[say("It rains in Paris.")] * 2)
    assert "It rains in Paris." in run_python(server, tmp_path, "litellm_ollama ollama", "venv-ollama")


@pytest.mark.parametrize("program", ["llama_index_ollama object", "llm_with_ollama object"])
def test_objects_over_ollamas_api(server: HttpServer, tmp_path: Path, program: str) -> None:
    """The schema is enforced."""
    script(server, say('{"name": "Paris"}'))
    assert "Paris" in run_python(server, tmp_path, program, "venv-ollama")
    (request,) = server.requests
    assert request.sampling.grammar


def test_atomic_agents(server: HttpServer, tmp_path: Path) -> None:
    if not list(Path(str(CLIENTS)).glob("venv-atomic/lib/python3.1[2-9]")):
        pytest.skip("its version 2 wants Python 3.12")
    script(server, *[say('{"chat_message": "It rains in Paris."}')] * 3)
    assert "It rains in Paris." in run_python(server, tmp_path, "atomic_agents_agent", "venv-atomic")
    assert all(request.sampling.grammar for request in server.requests)


def test_openais_shell_and_editor(server: HttpServer, tmp_path: Path) -> None:
    patch: dict[str, object] = {"type": "create_file", "path": "weather.txt", "diff": "+Rain."}
    script(
        server, call("apply_patch", patch), call("shell", {"commands": ["cat weather.txt"]}), say("It rains.")
    )
    assert "It rains." in run_python(server, tmp_path, "openai_agents_shell", "venv-agents")
    prompt = prompt_of(server)
    assert "<tool_response>\nCreated.\n</tool_response>" in prompt
    assert "<tool_response>\nRain.\n</tool_response>" in prompt


def test_claudes_agent_sdk(server: HttpServer, tmp_path: Path) -> None:
    """Two questions in one session; the tool runs in the client's own process."""
    weather = "mcp__w__weather"
    script(server, *[call(weather, PARIS)] * 2, say("It rains."), say("It rains in Paris."))
    said = run_python(server, tmp_path, "claude_agent_sdk_session", "venv-agents")
    assert said.splitlines() == ["success It rains.", "success It rains in Paris."]
    assert len(server.requests) == 4
    assert prompt_of(server).count("<tool_response>\nRain.\n</tool_response>") == 2


def test_anthropics_memory_tool(server: HttpServer, tmp_path: Path) -> None:
    path = "/memories/weather.txt"
    create = call("memory", {"command": "create", "path": path, "file_text": "Sun."})
    replace = call("memory", {"command": "str_replace", "path": path, "old_str": "Sun", "new_str": "Rain"})
    script(server, create, replace, say("It rains in Paris."))
    assert "It rains in Paris." in run_python(server, tmp_path, "anthropic_memory")
    assert len(server.requests) == 3


@pytest.mark.parametrize("environment", ["venv", "venv-openai3"])
def test_openais_custom_tools(server: HttpServer, tmp_path: Path, environment: str) -> None:
    script_calls(server, "weather", {"input": "Paris"})
    took_three_turns(server, run_python(server, tmp_path, "openai_custom_tool", environment))


def test_anthropics_context_edits(server: HttpServer, tmp_path: Path) -> None:
    script_calls(server, "weather", PARIS)
    assert "It rains in Paris." in run_python(server, tmp_path, "anthropic_context")
    assert prompt_of(server).count("<tool_response>\nRain. Rain.") == 1
    assert prompt_of(server).count("<tool_response>") == 2


def test_instructor(server: HttpServer, tmp_path: Path) -> None:
    script(server, *[call("weather", PARIS)] * 2, call("weather", {"city": "Rome"}))
    assert "Rome" in run_python(server, tmp_path, "instructor_model")
    assert len(server.requests) == 3
    assert prompt_of(server).count("<tool_response>\nValidation Error found") == 2


def test_smolagents(server: HttpServer, tmp_path: Path) -> None:
    script(server, *[call("weather", PARIS)] * 2, call("final_answer", {"answer": "It rains in Paris."}))
    assert "It rains in Paris." in run_python(server, tmp_path, "smolagents_agent")
    assert len(server.requests) == 3
    assert all(request.sampling.grammar for request in server.requests), "a tool must be called"
    assert prompt_of(server).count("Observation:\nRain.") == 2


def sections(**texts: str) -> Answer:
    """An answer as DSPy asks for it."""
    return say(
        "".join(f"[[ ## {name} ## ]]\n{text}\n\n" for name, text in texts.items()) + "[[ ## completed ## ]]"
    )


def test_dspy(server: HttpServer, tmp_path: Path) -> None:
    # One name in some versions, the other in others.
    thought = {"next_thought": "Hm.", "next_reasoning": "Hm."}
    look = sections(**thought, next_tool_name="weather", next_tool_args=json.dumps(PARIS))
    finish = sections(**thought, next_tool_name="finish", next_tool_args="{}")
    script(server, look, look, finish, sections(reasoning="Hm.", answer="It rains in Paris."))
    assert "It rains in Paris." in run_python(server, tmp_path, "dspy_react")
    assert len(server.requests) == 4
    assert "[[ ## observation_1 ## ]]\nRain." in prompt_of(server)


def test_mem0(server: HttpServer, tmp_path: Path) -> None:
    facts = ("Likes rain", "Lives in Paris", "Has a fox")
    memories = [{"memory": [{"id": "0", "text": fact, "attributed_to": "user"}]} for fact in facts]
    script(server, *[say(json.dumps(memory)) for memory in memories])
    assert sorted(run_python(server, tmp_path, "mem0_memory", "venv-openai3").splitlines()) == sorted(facts)
    assert len(server.requests) == 3
    assert '"text": "Lives in Paris"' in prompt_of(server), "what was remembered is shown"


@pytest.mark.parametrize("program", NODE)
def test_node(server: HttpServer, tmp_path: Path, program: str) -> None:
    if shutil.which("node", path=search_path()) is None:
        pytest.skip("node is not installed")
    script_calls(server, "weather", PARIS)
    name, *arguments = program.split()
    (tmp_path / "node_modules").symlink_to(Path(str(CLIENTS)).resolve() / "node_modules")
    shutil.copy(PROGRAMS / f"{name}.mjs", tmp_path)
    took_three_turns(server, run(["node", f"{name}.mjs", server.url, NAME, *arguments], tmp_path))


def test_codex(server: HttpServer, tmp_path: Path) -> None:
    script_calls(server, "exec_command", {"cmd": "echo Rain."})
    home = tmp_path / "codex"
    home.mkdir()
    flags = ("--skip-git-repo-check", "--sandbox", "danger-full-access")
    said = run_agent(server, tmp_path, "codex", "exec", *flags, "Go.", CODEX_HOME=str(home))
    assert "It rains in Paris." in said
    assert len(server.requests) == 3
    prompt = prompt_of(server)
    assert prompt.count('"arguments": {"cmd": "echo Rain."}') == 2
    assert "spawn_agent" in prompt, "tools of a namespace"
    assert '"name": "web_search"' not in prompt, "tools that run at OpenAI"


def test_claude_code(server: HttpServer, tmp_path: Path) -> None:
    script_calls(server, "Bash", {"command": "echo Rain.", "description": "Says rain."})
    said = run_agent(server, tmp_path, "claude", "-p", "Go.", "--allowedTools", "Bash")
    assert "It rains in Paris." in said
    assert len(server.requests) == 3
    prompts = [prompt_of(server)]
    assert prompts[-1].count("Rain.\n</tool_response>") == 2
    assert "x-anthropic-billing-header" not in prompts[-1]


def call_twice(server: HttpServer, name: str, arguments: dict[str, object]) -> None:
    """As `script_calls`, for agents that also ask beside the conversation, such as for its title."""
    server.requests.clear()

    def answer(one: HttpServer, request: GenerateRequest) -> None:
        prompt = one.tokenizer.decode(tokens_of(request), skip_special=False)
        must_call = f'"name": "{name}"' in prompt and prompt.count("<tool_response>") < 2
        (call(name, arguments) if must_call else say("It rains in Paris."))(one, request)

    server.answer = answer


def was_told_twice(server: HttpServer, said: str, told: str = "Rain.\n") -> None:
    assert "It rains in Paris." in said
    assert prompt_of(server).count("<tool_response>") == 2
    assert prompt_of(server).count(told) >= 2


@pytest.mark.parametrize("program", AGENTS)
def test_agents(server: HttpServer, tmp_path: Path, program: str) -> None:
    """Some try the server before the conversation, and some wrap what a tool returns."""
    call_twice(server, "weather", PARIS)
    was_told_twice(server, run_python(server, tmp_path, program, "venv-agents"), "Rain.")


def test_qwen_code(server: HttpServer, tmp_path: Path) -> None:
    command = {"command": "echo Rain.", "description": "Says rain.", "is_background": False}
    call_twice(server, "run_shell_command", command)
    said = run_agent(server, tmp_path, "qwen", "-p", "Go.", "-y")
    was_told_twice(server, said)


def test_opencode(server: HttpServer, tmp_path: Path) -> None:
    call_twice(server, "bash", {"command": "echo Rain.", "description": "Says rain."})
    settings = {"permission": {"bash": "allow"}, "autoupdate": False}
    (tmp_path / "opencode.json").write_text(json.dumps(settings))  # the user's own, which stay
    was_told_twice(server, run_agent(server, tmp_path, "opencode", "run", "Go."))


def test_cline(server: HttpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    call_twice(server, "run_commands", {"commands": ["echo Rain."]})
    said = run_agent(server, tmp_path, "cline", "--json", "--auto-approve", "true", "Go on.")
    was_told_twice(server, said, '"result":"Rain.\\n","success":true')
