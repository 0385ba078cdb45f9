"""The servers that the documentation starts, started: the demonstration model stands for its models, on the CPU.

Left out are flags of a GPU, names of the Hub, folders, adapters, towers, drafting models and remote workers, which have
tests of their own.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from moeserve.cli.command_line import demonstration_model
from moeserve.cli.main import COMMANDS
from tests.support.rules.page_commands import PageCommand, commands
from tests.support.servers.server import running_server

ELSEWHERE = frozenset(
    {
        *(
            "--num-gpu-experts",
            "--gpu-memory-budget",
            "--n-gpu-layers",
            "--placement-rules",
            "--expert-heat",
            "cuda",
        ),
        *(
            "--lora-modules",
            "--lora-dir",
            "--mmproj",
            "--speculative-model",
            "--worker",
            "--models-file",
            "[flags]",
            "/models/name/",
        ),
    }
)
MODEL = re.compile(r"[\w./-]+\.gguf|MODEL|…")
HUB = re.compile(r"org/repo\S*|unsloth/\S+")  # org/repo-GGUF:Q4_K_M
DRAFTING_MODEL = re.compile(r'"model": "')  # in --speculative-config


def servers() -> list[PageCommand]:
    """Each once, whichever pages have it."""
    found = {command.words: command for command in commands() if command.program == "moeserve"}
    return [one for one in found.values() if is_server(one.words[1:]) and ELSEWHERE.isdisjoint(one.words)]


def is_server(words: tuple[str, ...]) -> bool:
    names = [word for word in words[:1] if word in COMMANDS]
    return names in ([], ["serve"]) and not any(
        HUB.fullmatch(word) or DRAFTING_MODEL.search(word) for word in words
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", servers(), ids=lambda one: f"{one.page}: {' '.join(one.words)[:60]}")
def test_a_server_starts_and_answers(
    command: PageCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [one for one in command.words[1:] if one not in ("serve", "--model", "--port", "9000", "8000")]
    flags, copies = [], 0
    for word in words:
        if MODEL.fullmatch(word):
            copies += 1
            shutil.copyfile(demonstration_model(), tmp_path / f"model-{copies}.gguf")
            word = f"model-{copies}.gguf"
        flags.append(word.replace("/var/lib/moeserve", str(tmp_path)))
    model = flags.index("model-1.gguf")
    with running_server(tmp_path / flags.pop(model), *flags) as server:
        card = httpx.get(server.base_url + "/v1/models").json()["data"][0]
        body = {
            "model": card["id"],
            "messages": [{"role": "user", "content": "What is 27 + 15?"}],
            "temperature": 0,
        }
        answer = httpx.post(server.base_url + "/v1/chat/completions", json=body, timeout=60)
        assert "42" in answer.json()["choices"][0]["message"]["content"], json.dumps(answer.json())


def test_there_are_servers() -> None:
    assert len(servers()) >= 8


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_certificates_for_a_remote_worker_are_made(tmp_path: Path) -> None:
    """The page's commands in their order, with the keys and certificates that they name."""
    made = [one for one in commands() if one.program == "openssl" and one.words[1:2] == ("req",)]
    assert len(made) == 3
    for command in made:
        done = subprocess.run(["bash", "-c", command.text], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    for name in ("worker", "server"):
        words = ["openssl", "verify", "-CAfile", "ca.pem", f"{name}.pem"]
        checked = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        assert checked.stdout.strip() == f"{name}.pem: OK", checked.stderr
