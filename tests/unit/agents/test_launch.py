"""`moeserve launch`: the agent's environment and arguments, and the server that it finds or starts."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from moeserve.cli import background_server
from moeserve.cli import main as cli
from moeserve.cli.agents import command
from moeserve.cli.agents.agents import AGENTS, Endpoint, Start
from moeserve.cli.running_server import ServedModel, ServerGone
from moeserve.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[3]
PAGE = (REPOSITORY / "docs/how-to/connect-an-agent.md").read_text()
SERVER = Endpoint("http://localhost:8000", "qwen3-30b-a3b", 65536)
SAYS = """
import json, os, sys
keep = ("ANTHROPIC_BASE_URL", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_MODEL", "ANTHROPIC_API_KEY", "NO_PROXY")
print(json.dumps([sys.argv[1:], {name: os.environ[name] for name in keep if name in os.environ}]))
sys.exit(7)
"""


def start(name: str, server: Endpoint = SERVER) -> Start:
    return AGENTS[name].start(AGENTS[name].program, server, [])


def fenced(section: str, language: str) -> str:
    found = re.search(rf"^## {section}\n.*?^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("name", ["claude", "qwen"])
def test_the_page_has_the_variables(name: str) -> None:
    words = set(shlex.split(" ".join(re.findall(r"^\$ export (.*)$", PAGE, re.MULTILINE))))
    missing = {f"{key}={value}" for key, value in start(name).environment.items()} - words
    assert not missing


def test_the_page_has_codexs_settings() -> None:
    on_page = tomllib.loads(fenced("Codex", "toml"))
    (arguments,) = start("codex", SERVER._replace(context_length=None)).commands
    given = tomllib.loads("\n".join(part for part in arguments[1:] if part != "-c"))
    assert given == on_page
    (with_key,) = start("codex", SERVER._replace(api_key="sk-1")).commands
    assert 'model_providers.local.env_key="MOESERVE_AGENT_KEY"' in with_key
    assert "sk-1" not in " ".join(with_key), "arguments are seen by other users"


def test_the_page_has_opencodes_settings() -> None:
    assert json.loads(start("opencode").environment["OPENCODE_CONFIG_CONTENT"]) == json.loads(
        fenced("OpenCode", "json")
    )


def test_the_page_has_clines_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    first, second = start("cline").commands
    own = ["--data-dir", str(tmp_path / "moeserve/cline")]
    assert list(second) == ["cline", *own]
    assert shlex.join(part for part in first if part not in own) in PAGE


def test_the_page_names_every_agent() -> None:
    for name, agent in AGENTS.items():
        assert f"moeserve launch {name}" in PAGE
        assert agent.install.startswith("npm install --global ")


def test_an_answer_leaves_room_in_a_small_context() -> None:
    environment = start("claude", SERVER._replace(context_length=16384)).environment
    assert environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "2048"
    assert (
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS"
        not in start("claude", SERVER._replace(context_length=None)).environment
    )


@pytest.fixture
def claude(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of that name that says what it was given."""
    program = tmp_path / "claude"
    program.write_text(f"#!{sys.executable}\n{SAYS}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "the user's own")


def test_an_agent_gets_its_arguments_and_its_exit_code_is_ours(
    claude: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    served = [ServedModel("qwen3", 4096)]
    monkeypatch.setattr(background_server, "models_at", lambda url, key, **_: served)
    monkeypatch.setattr(background_server, "_health", lambda url: {"status": "ok"})
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    arguments = ["launch", "claude", "--port", "1234", "--api-key", "sk-1", "--", "-p", "Go.", "--help"]
    assert cli.main(arguments) == 7
    given, environment = json.loads(capfd.readouterr().out)
    assert given == ["-p", "Go.", "--help"]
    assert environment == {
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:1234",
        "ANTHROPIC_AUTH_TOKEN": "sk-1",
        "ANTHROPIC_MODEL": "qwen3",
        "NO_PROXY": "127.0.0.1",
    }


@pytest.mark.parametrize(
    ("environment", "url", "excepted"),
    [
        ({"http_proxy": "http://proxy:3128"}, "http://127.0.0.1:8000", "127.0.0.1"),
        ({"ALL_PROXY": "socks5://proxy", "NO_PROXY": ".corp"}, "http://localhost:8000", ".corp,localhost"),
        ({"HTTPS_PROXY": "http://proxy:3128"}, "http://[::1]:8000", "::1"),
        ({"http_proxy": "http://proxy:3128", "NO_PROXY": "*"}, "http://127.0.0.1:8000", None),
        (
            {"http_proxy": "http://proxy:3128", "no_proxy": "*", "NO_PROXY": ".corp"},
            "http://127.0.0.1:8000",
            None,
        ),
        (
            {"http_proxy": "http://proxy:3128", "no_proxy": ".corp, ::1", "NO_PROXY": "::1,.lan,"},
            "http://127.0.0.1:8000",
            ".corp,::1,.lan,127.0.0.1",
        ),
        (
            {"http_proxy": "http://proxy:3128", "no_proxy": "127.0.0.1,.corp"},
            "http://127.0.0.1:8000",
            "127.0.0.1,.corp",
        ),
        ({"http_proxy": ""}, "http://127.0.0.1:8000", None),
        ({"http_proxy": "http://proxy:3128"}, "http://gpu.corp:8000", None),
    ],
)
def test_a_server_here_is_not_asked_by_a_proxy(
    environment: dict[str, str], url: str, excepted: str | None
) -> None:
    """Where HTTP_PROXY is set and NO_PROXY is not, clients of other servers here got the proxy's error page."""
    said = command.past_proxies(environment, url)
    assert said == ({} if excepted is None else {"NO_PROXY": excepted, "no_proxy": excepted})


def test_an_agent_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["launch", "codex"]) == 127
    assert "codex is not installed: npm install --global @openai/codex" in capsys.readouterr().err


def test_no_server_and_no_model(
    claude: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(url: str, key: str | None, **_: bool) -> list[ServedModel]:
        raise ServerGone(f"no server answers at {url}; start one: moeserve --model MODEL")

    monkeypatch.setattr(background_server, "models_at", gone)
    monkeypatch.delenv("MOESERVE_MODEL", raising=False)
    assert cli.main(["launch", "claude"]) == 1
    assert "no server answers at http://127.0.0.1:8000" in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_that_cannot_start(claude: None, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(REPOSITORY / "no-such-model.gguf")
    assert cli.main(["launch", "claude", "--port", "18731", "--model", missing]) == 1
    said = capsys.readouterr().err
    assert "the server did not start" in said
    assert f"there is no {missing}" in said


def test_a_server_of_another_model_is_told() -> None:
    served = [ServedModel("a/b:Q8_0", 1), ServedModel("tiny", 2)]
    assert background_server._wanted("u", served, "").name == "a/b:Q8_0"
    assert background_server._wanted("u", served, "/models/tiny.gguf").name == "tiny"
    with pytest.raises(UserError, match="serves a/b:Q8_0, tiny, not c"):
        background_server._wanted("u", served, "c")


def test_the_first_command_that_fails_ends_a_start() -> None:
    fails = (sys.executable, "-c", "raise SystemExit(3)")
    never = (sys.executable, "-c", "raise SystemExit(4)")
    assert command.run(Start((fails, never))) == 3
