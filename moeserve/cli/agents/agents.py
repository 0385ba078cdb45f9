"""Makes the commands that start coding agents with a model of this server, in the way that
docs/how-to/connect-an-agent.md describes and the tests check.

An agent's own settings are never changed: everything is passed in environment variables, in arguments, or in a folder
of moeserve's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

NO_KEY: Final = "none"  # the key for agents that insist on one
LONGEST_ANSWER: Final = 8192  # tokens
ANSWER_SHARE: Final = 8  # an answer has at most 1 / ANSWER_SHARE of the context
COMPACT_PERCENT: Final = 85


class Endpoint(NamedTuple):
    url: str  # without /v1
    model: str
    context_length: int | None  # tokens, if known
    api_key: str | None = None

    @property
    def key(self) -> str:
        return self.api_key or NO_KEY


@dataclass(frozen=True)
class Start:
    """Commands that run one after another, the agent last, and changes of their environment."""

    commands: tuple[tuple[str, ...], ...]
    environment: dict[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()  # variables that would send the agent to another server


class Agent(NamedTuple):
    program: str
    package: str  # name in npm
    start: Callable[
        [str, Endpoint, Sequence[str]], Start
    ]  # arguments: program, server, the agent's arguments

    @property
    def install(self) -> str:
        return f"npm install --global {self.package}"


def _claude(program: str, server: Endpoint, arguments: Sequence[str]) -> Start:
    environment = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        "ANTHROPIC_MODEL": server.model,
        "ANTHROPIC_SMALL_FAST_MODEL": server.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if server.context_length is not None:
        # It assumes a context of 200,000 tokens for an unknown model.
        environment |= {
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(server.context_length),
            "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": str(COMPACT_PERCENT),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(min(LONGEST_ANSWER, server.context_length // ANSWER_SHARE)),
        }
    return Start(((program, *arguments),), environment, unset=("ANTHROPIC_API_KEY",))


def _codex(program: str, server: Endpoint, arguments: Sequence[str]) -> Start:
    """Passes settings by -c. The values are TOML; JSON strings are valid TOML."""
    provider = "model_providers.local"
    settings: dict[str, str | int] = {
        "model": server.model,
        "model_provider": "local",
        f"{provider}.name": "local",
        f"{provider}.base_url": f"{server.url}/v1",
        f"{provider}.wire_api": "responses",
    }
    if server.context_length is not None:
        settings["model_context_window"] = server.context_length
    environment = {}
    if server.api_key is not None:
        settings[f"{provider}.env_key"] = "MOESERVE_AGENT_KEY"
        environment["MOESERVE_AGENT_KEY"] = server.api_key
    flags = [part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    return Start(((program, *flags, *arguments),), environment)


def _qwen(program: str, server: Endpoint, arguments: Sequence[str]) -> Start:
    environment = {
        "OPENAI_BASE_URL": f"{server.url}/v1",
        "OPENAI_API_KEY": server.key,
        "OPENAI_MODEL": server.model,
    }
    return Start(((program, *arguments),), environment)


def _opencode(program: str, server: Endpoint, arguments: Sequence[str]) -> Start:
    settings = {
        "provider": {
            "local": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": f"{server.url}/v1", "apiKey": server.key},
                "models": {server.model: {}},
            }
        },
        "model": f"local/{server.model}",
    }
    return Start(((program, *arguments),), {"OPENCODE_CONFIG_CONTENT": json.dumps(settings)})


def _cline(program: str, server: Endpoint, arguments: Sequence[str]) -> Start:
    """Returns a start that first runs Cline's own `auth` command, which writes the provider into a folder of
    moeserve's."""
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "moeserve" / "cline"
    own = ("--data-dir", str(data))
    provider = ("--provider", "openai-compatible", "--baseurl", f"{server.url}/v1")
    auth = (program, "auth", *own, *provider, "--apikey", server.key, "--modelid", server.model)
    return Start((auth, (program, *own, *arguments)))


AGENTS: Final = {
    "claude": Agent("claude", "@anthropic-ai/claude-code", _claude),
    "codex": Agent("codex", "@openai/codex", _codex),
    "qwen": Agent("qwen", "@qwen-code/qwen-code", _qwen),
    "opencode": Agent("opencode", "opencode-ai", _opencode),
    "cline": Agent("cline", "cline", _cline),
}
