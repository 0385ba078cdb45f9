"""The documentation's commands that the demonstration model can answer, run as a reader would run them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from moeserve.cli.command_line import demonstration_model
from moeserve.cli.main import main
from tests.support.rules.page_commands import PageCommand, commands
from tests.support.servers.server import REPOSITORY, Server, clean_environment

# Pages whose requests another model answers: one with adapters, and one with tokens for fill-in-the-middle.
OTHER_MODELS = ("docs/how-to/lora.md", "docs/how-to/complete-code-in-an-editor.md")
ALL = list({command.words: command for command in commands()}.values())  # each once, whichever pages have it


def named(command: PageCommand) -> str:
    return f"{command.page}: {' '.join(command.words)[:60]}"


@pytest.mark.parametrize(
    "command", [one for one in ALL if one.program == "curl" and one.page not in OTHER_MODELS], ids=named
)
def test_curl_is_answered(demonstration: Server, command: PageCommand, tmp_path: str) -> None:
    text = re.sub(r"(http://)?(localhost|127\.0\.0\.1):8000", demonstration.base_url, command.text)
    assert text != command.text
    shell = subprocess.run(
        ["bash", "-c", text.replace("curl ", "curl --fail-with-body ", 1)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert shell.returncode == 0, shell.stdout + shell.stderr
    if "data: " in shell.stdout:
        assert "data: [DONE]" in shell.stdout
    elif " -o " not in text:
        assert "error" not in json.loads(shell.stdout)


@pytest.mark.parametrize(
    "command",
    [
        one
        for one in ALL
        if one.program == "moeserve" and one.words[1:2] in (("plan",), ("show",), ("doctor",), ("list",))
    ],
    ids=named,
)
def test_questions_about_a_model_and_a_machine_are_answered(
    command: PageCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    if any(word.endswith(".trace") or "org/repo" in word for word in command.words):
        pytest.skip("needs a recorded trace, or a model of the Hub")
    model = str(demonstration_model())
    words = [model if word.endswith(".gguf") else word for word in command.words[1:]]
    code = main(words)
    said = capsys.readouterr()
    assert said.out
    assert "Traceback" not in said.err
    assert code == 0 or (words[0] == "doctor" and "error" in said.out), said.err


def questions() -> list[PageCommand]:
    """`moeserve run` with a question; without one it is a chat, which tests/e2e/commands/test_run_chat.py has."""
    ours = [one for one in ALL if one.program == "moeserve" and one.words[1:2] == ("run",)]
    return [one for one in ours if "-p" in one.words or (len(one.words) > 3 and one.words[2] == "MODEL")]


@pytest.mark.parametrize("command", questions(), ids=named)
def test_questions_to_a_model_are_answered(demonstration: Server, command: PageCommand) -> None:
    (model,) = (one["id"] for one in httpx.get(demonstration.base_url + "/v1/models").json()["data"])
    words = [model if word == "MODEL" else word for word in command.words[1:]]
    shell = subprocess.run(
        [sys.executable, "-m", "moeserve", *words, "--port", demonstration.base_url.rpartition(":")[2]],
        input="A line that is piped in.\n",
        capture_output=True,
        text=True,
        env=clean_environment(),
        cwd=REPOSITORY,
    )
    assert (shell.returncode, "Traceback" in shell.stderr) == (0, False), shell.stderr
    # The model is sampled and knows no answer to these questions: it may end at once, or write blanks until it is cut.
    notes = ("the answer was cut", "the answer has no text")
    assert shell.stdout.strip() or any(note in shell.stderr for note in notes), shell.stderr


def test_there_are_questions() -> None:
    assert len(questions()) >= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        one
        for one in ALL
        if one.program == "moeserve" and one.words[1:2] == ("simulate",) and "--step-time" not in one.words
    ],
    ids=named,
)
def test_simulations_run(command: PageCommand, capsys: pytest.CaptureFixture[str]) -> None:
    words = [re.sub(r"\$\w+", "0.5", word) for word in command.words[1:]]
    words[words.index("--num-prompts") + 1] = "20"  # thousands take minutes
    assert main(words) == 0
    assert "TTFT" in capsys.readouterr().out


def measurements() -> list[PageCommand]:
    """`moeserve bench` on this machine's CPU. Pictures need another model, and `steps` takes minutes."""
    ours = [one for one in ALL if one.program == "moeserve" and one.words[1:2] == ("bench",)]
    others = {"--device", "--num-gpu-experts", "--against-engine", "random-mm", "steps"}
    return [one for one in ours if others.isdisjoint(one.words)]


SHORTER = {
    "engine": ["--prompt", "32", "--gen", "4", "--batch", "1"],
    "serve": ["--num-prompts", "4", "--request-rate", "inf"],
    "trace": ["--tokens", "64"],
}


@pytest.mark.slow
@pytest.mark.parametrize("command", measurements(), ids=named)
def test_measurements_run(demonstration: Server, command: PageCommand, tmp_path: Path) -> None:
    model = str(demonstration_model())
    words = [model if word.endswith(".gguf") else word for word in command.words[1:]]
    words = [demonstration.base_url if word.startswith("http://127.0.0.1") else word for word in words]
    done = subprocess.run(
        [sys.executable, "-m", "moeserve", *words, *SHORTER[words[1]]],
        capture_output=True,
        text=True,
        env=clean_environment() | {"PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    written = [words[place + 1] for place, word in enumerate(words) if word in ("--output", "--save-result")]
    assert done.stdout.strip() or written
    assert all((tmp_path / name).stat().st_size > 0 for name in written)


def test_there_are_measurements_of_each_kind() -> None:
    assert {one.words[2] for one in measurements()} == set(SHORTER)
