"""`moeserve run`: its arguments, one question, pipes and exit codes. Complaints about other programs name their
report."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import pytest

from moeserve.cli import main as cli
from moeserve.cli.run.slash_commands import COMMANDS
from tests.support.chats.scripted_answers import prompt_of
from tests.support.clients.raw_server import piece, raw_server, stream_of
from tests.support.clients.run_chats import REASONED
from tests.support.servers.http_harness import NAME, HttpServer, http_server, say
from tests.support.servers.server import REPOSITORY, clean_environment

GUIDE = REPOSITORY / "docs" / "how-to" / "chat-in-the-terminal.md"


def run(
    url: str, *arguments: str, stdin: bytes | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """stdin: None for /dev/null, else what is piped in."""
    command = [sys.executable, "-m", "moeserve", "run", "--url", url, *arguments]
    env = clean_environment() | dict(environment or {})
    if stdin is None:
        null = subprocess.DEVNULL
        return subprocess.run(command, stdin=null, capture_output=True, check=False, cwd=REPOSITORY, env=env)
    return subprocess.run(command, input=stdin, capture_output=True, check=False, cwd=REPOSITORY, env=env)


def run_here(url: str, *arguments: str, stdin: bytes | None) -> subprocess.CompletedProcess[bytes]:
    """The same in this process, which saves the start of another: 0.2 s of CPU time."""
    command = ["run", "--url", url, *arguments]
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as piped:
        piped.write(stdin or b"")
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    with (
        os.fdopen(reader) as pipe,
        Path(os.devnull).open() as null,
        mock.patch.dict(os.environ, clean_environment(), clear=True),
        mock.patch.multiple(sys, stdin=null if stdin is None else pipe, stdout=out, stderr=err),
    ):
        try:
            code = cli.main(command)
        except SystemExit as ended:
            code = int(ended.code or 0)
        for stream in (out, err):
            stream.flush()
    written = [stream.detach().getvalue() for stream in (out, err)]
    return subprocess.CompletedProcess(command, code, *written)


def test_only_the_answer_is_written(server: HttpServer) -> None:
    """ollama/ollama#6120, #7937: control characters of its progress. ollama/ollama#15629, simonw/llm#964: the
    reasoning."""
    server.answer = say(*REASONED)
    ran = run(server.url, NAME, "Is", "it?")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"Here you are.\n", b"")
    assert "user\nIs it?<|im_end|>" in prompt_of(server)


def test_all_else_goes_to_standard_error(server: HttpServer) -> None:
    server.answer = say(*REASONED)
    ran = run(server.url, "-p", "?", "--verbose", "--reasoning", "show")
    assert ran.stdout == b"Here you are.\n"
    assert ran.stderr.startswith(b"reasoning:\n")
    assert b"Let me see." in ran.stderr
    assert b"\nprompt: " in ran.stderr
    assert b"\x1b" not in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "piped", "asked"),
    [
        (["-p", "Sum it up."], b"A text.\n", "A text.\n\nSum it up."),
        ([NAME, "Sum it up."], "日本\n".encode(), "日本\n\nSum it up."),
        # simonw/llm#606, ROCm/rocm-cli#339: a chat that took what was piped in for a user who left.
        ([], b"Hello\nthere\n", "Hello\nthere"),
        ([NAME], b"Hello", "Hello"),
        ([NAME, "Hello"], b"", "Hello"),
        ([NAME, "--", "-1 + 1?"], None, "-1 + 1?"),
        ([NAME, "--set", "seed=1", "Hello", "--set", "top_k=2"], None, "Hello"),
        (["--model", NAME, "Hello", "there"], None, "Hello there"),
    ],
)
def test_the_question(server: HttpServer, arguments: list[str], piped: bytes | None, asked: str) -> None:
    server.answer = say("Yes.")
    ran = run_here(server.url, *arguments, stdin=piped)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"Yes.\n", b"")
    assert f"user\n{asked}<|im_end|>" in prompt_of(server)


@pytest.mark.parametrize(
    ("arguments", "piped", "code", "says"),
    [
        # ggml-org/llama.cpp#12949: a chat with /dev/null that went on for ever.
        ([], None, 2, "there is no question; give one as moeserve run MODEL"),
        ([], b" \n", 2, "there is no question"),
        ([], b"\xff\xfe\x00", 1, "standard input is neither UTF-8 text nor a PNG"),
        (["another", "Hello"], None, 1, f"serves {NAME}, not another; leave the model out"),
        (
            ["What is this?"],
            None,
            2,
            "give the question after MODEL; without a MODEL, give it as --prompt",
        ),
        (["-p", "x", "--image", "none.png"], None, 1, "none.png cannot be read: No such file"),
        (["-p", "x", "--set", "temperature=9"], None, 2, "temperature: must be 0 to 2"),
        (["-p", "x", "--port", "1"], None, 2, "--port: has no effect on the server of --url"),
        ([NAME, "x", "-p", "y"], None, 2, "--prompt: the question is given twice"),
        (["-p", "x", "--reasoning", "some"], None, 2, "invalid choice"),
        (["-p", "long " * 600], None, 1, "the server says: "),
    ],
)
def test_errors(server: HttpServer, arguments: list[str], piped: bytes | None, code: int, says: str) -> None:
    """sigoden/aichat#516: the exit code was 0."""
    ran = run_here(server.url, *arguments, stdin=piped)
    last = ran.stderr.decode().splitlines()[-1]
    assert (ran.returncode, ran.stdout) == (code, b"")
    assert last.startswith("moeserve run: ")
    assert says in last


def test_a_model_that_sees_no_pictures(server: HttpServer, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    ran = run(server.url, "-p", "x", "--image", str(tmp_path / "a.png"))
    assert (ran.returncode, ran.stdout) == (1, b"")
    assert f"{NAME} cannot see pictures; name the file of its vision tower".encode() in ran.stderr


def test_a_picture_from_a_pipe_goes_to_a_gateways_model() -> None:
    """Whose list of models is not ours."""
    card = {"id": "vision", "owned_by": "a gateway", "architecture": {"input_modalities": ["text", "image"]}}
    models = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + json.dumps({"data": [card]}).encode()
    absent = b"HTTP/1.1 404 No\r\n\r\n<html>"
    with raw_server([models], [absent], [models], [stream_of(piece("A cat."), "[DONE]")]) as (url, requests):
        ran = run(url, "-p", "What is it?", stdin=b"\x89PNG\r\n\x1a\n")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"A cat.\n", b"")
    assert b'"url": "data:image/png;base64,iVBORw0KGgo="' in requests[-1]


def test_no_server_and_another_program() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    ran = run(url, "-p", "x")
    assert (ran.returncode, ran.stdout) == (1, b"")
    assert f"moeserve run: no server answers at {url}".encode() in ran.stderr
    with raw_server([b"HTTP/1.1 200 OK\r\n\r\n<html>"]) as (url, _):
        ran = run(url, "-p", "x")
    assert ran.returncode == 1
    assert b"is not moeserve" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_a_key() -> None:
    with http_server(api_key=("sk-1",)) as server:
        server.answer = say("Yes.")
        without = run(server.url, "-p", "x")
        assert without.returncode == 1
        assert b"needs an API key; give it with --api-key or MOESERVE_API_KEY" in without.stderr
        assert run(server.url, "-p", "x", "--api-key", "sk-1").stdout == b"Yes.\n"
        assert run(server.url, "-p", "x", environment={"MOESERVE_API_KEY": "sk-1"}).stdout == b"Yes.\n"


def test_an_answer_that_breaks_off_is_an_error() -> None:
    card = {"id": NAME, "owned_by": "moeserve", "context_length": 512}
    models = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + json.dumps({"data": [card]}).encode()
    ready = b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"status": "ok"}'
    with raw_server([models], [ready], [models], [stream_of(piece("half"))]) as (url, _):
        ran = run(url, "-p", "x")
    assert (ran.returncode, ran.stdout) == (1, b"half\n")
    assert b"was lost; ask again when the server is back\n" in ran.stderr


def test_names_and_errors_of_a_server_are_made_safe() -> None:
    card = {"id": "evil\x1b[2J", "owned_by": "moeserve", "context_length": 512}
    models = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + json.dumps({"data": [card]}).encode()
    with raw_server([models]) as (url, _):
        ran = run(url, "another", "x")
    assert ran.returncode == 1
    assert b"serves evil, not another" in ran.stderr
    assert b"\x1b" not in ran.stderr


def test_a_closed_pipe_is_quiet(server: HttpServer) -> None:
    server.answer = say(*[f"line {i}\n" for i in range(200)])
    command = [sys.executable, "-m", "moeserve", "run", "--url", server.url, "-p", "x"]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environment(),
        cwd=REPOSITORY,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.wait() == 141
        assert process.stderr.read() == b""


def test_a_locale_without_the_models_characters(server: HttpServer) -> None:
    server.answer = say("é 日本")
    ran = run(server.url, "-p", "x", environment={"PYTHONIOENCODING": "latin-1:strict"})
    assert (ran.returncode, ran.stdout) == (0, "é ??\n".encode("latin-1"))


ASCII = {
    "LC_ALL": "C",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
}  # Python itself turns to UTF-8 for LC_ALL=C


def test_a_question_in_utf8_in_a_locale_that_is_not(server: HttpServer) -> None:
    server.answer = say("Yes.")
    ran = run(server.url, "--system", "Höflich.", "-p", "Grüße?", environment=ASCII)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"Yes.\n", b"")
    assert "Höflich." in prompt_of(server)
    assert "Grüße?" in prompt_of(server)


def test_a_question_that_is_no_text(server: HttpServer) -> None:
    ran = run(server.url, "-p", os.fsdecode(b"\xff\xfe"))
    assert ran.returncode == 2
    assert b"the question is not UTF-8 text" in ran.stderr


def test_the_model_of_the_environment_is_for_servers_here(server: HttpServer) -> None:
    server.answer = say("Yes.")
    assert run(server.url, "-p", "x", environment={"MOESERVE_MODEL": "/models/a.gguf"}).stdout == b"Yes.\n"


def test_a_closed_standard_input(server: HttpServer) -> None:
    server.answer = say("Yes.")
    command = f"exec {sys.executable} -m moeserve run --url {server.url} -p x <&-"
    ran = subprocess.run(
        ["sh", "-c", command], capture_output=True, check=False, env=clean_environment(), cwd=REPOSITORY
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"Yes.\n", b"")


def test_the_command_completes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert '"run")' in script
    assert "'fold show hide'" in script


def test_the_page_names_every_command_and_flag() -> None:
    page = GUIDE.read_text()
    for name in COMMANDS.keys() - {"/exit", "/quit"}:
        assert f"`{name}" in page, name
    for flag in (
        "--url",
        "--api-key",
        "--system",
        "--set",
        "--image",
        "--reasoning",
        "--verbose",
        "--no-history",
    ):
        assert flag in page, flag


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "--help"])
    assert ended.value.code == 0
    assert "git diff | moeserve run" in capsys.readouterr().out
