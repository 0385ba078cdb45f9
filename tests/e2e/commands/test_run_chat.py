"""`moeserve run` at a pseudo-terminal, with real servers."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from moeserve.cli.run.history import FILE
from moeserve.cli.run.line_reader import PROMPT
from tests.support.chats.scripted_model import chat_template, write_scripted_model
from tests.support.clients.terminal import CTRL_C, CTRL_D, PATIENCE_S, Terminal
from tests.support.servers.server import REPOSITORY, Server, clean_environment, imports_from, running_server
from tests.support.servers.waiting import within

UP = "\x1b[A"
TAKEN = "\x1b[?2004l"  # readline no longer wants marks around what is pasted
GREEDY = ("--set", "temperature=0")
SUM, FACT = "What is 27 + 15?", "Mia has a red ball.\rWhat does Mia have?"


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "moeserve", "run", *arguments]


def environment(state: Path) -> dict[str, str]:
    return clean_environment() | imports_from(REPOSITORY) | {"XDG_STATE_HOME": str(state), "NO_COLOR": "1"}


def pasted(text: str) -> str:
    """As a terminal sends it to a program that has asked for marks around it."""
    return f"\x1b[200~{text}\x1b[201~"


def enter(terminal: Terminal, typed: str) -> None:
    """Returns when the program has taken the line: what comes then is no echo of it."""
    terminal.send(typed + "\r")
    terminal.wait_for(TAKEN)


def ask(terminal: Terminal, typed: str, answer: str) -> None:
    enter(terminal, typed)
    terminal.wait_for(f"{answer}\r\n")
    terminal.wait_for(PROMPT)


def test_a_chat(demonstration: Server, tmp_path: Path) -> None:
    """Pasted lines are one question (ggml-org/llama.cpp#26999: only the first line was taken)."""
    answered = demonstration.metrics()["moeserve:request_success_total"]
    with Terminal(command("--url", demonstration.base_url, *GREEDY), environment(tmp_path)) as terminal:
        terminal.wait_for(PROMPT)
        ask(terminal, SUM, "27 + 15 = 42")
        ask(terminal, pasted(FACT), "Mia has a red ball.")
        enter(terminal, '"""Tom has a blue cup.')
        ask(terminal, 'What does Tom have?"""', "Tom has a blue cup.")
        terminal.send("é中\x7f\x7fabc\x7f\x7f\x7f/show\r")  # a character is erased whole
        terminal.wait_for("conversation   6 messages\r\n")
        terminal.wait_for(PROMPT)  # a terminal keeps no Ctrl-D that comes before readline has it
        terminal.send(CTRL_D)
        assert terminal.wait() == 0
    history = tmp_path / "moeserve" / FILE
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert demonstration.metrics()["moeserve:request_success_total"] == answered + 3


def test_the_next_chat_has_the_history(demonstration: Server, tmp_path: Path) -> None:
    """A question of two lines comes back as one."""
    for typed in (pasted(FACT), UP):
        with Terminal(command("--url", demonstration.base_url, *GREEDY), environment(tmp_path)) as terminal:
            terminal.wait_for(PROMPT)
            ask(terminal, typed, "Mia has a red ball.")
            terminal.send("/bye\r")
            assert terminal.wait() == 0


def test_without_a_history(demonstration: Server, tmp_path: Path) -> None:
    """ollama/ollama#6124, #3002."""
    with Terminal(
        command("--url", demonstration.base_url, "--no-history", *GREEDY), environment(tmp_path)
    ) as terminal:
        terminal.wait_for(PROMPT)
        ask(terminal, SUM, "27 + 15 = 42")
        terminal.send(CTRL_D)
        assert terminal.wait() == 0
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c(server: Server, tmp_path: Path) -> None:
    """It stops an answer of two thousand tokens at once, clears a line, and leaves when it comes again."""
    flags = ("--url", server.base_url, *GREEDY)
    with Terminal(command(*flags), environment(tmp_path)) as terminal:
        terminal.wait_for(PROMPT)
        terminal.send("x\r")
        terminal.wait_for("errorcode")
        terminal.send(CTRL_C)
        came = terminal.wait_for("(stopped)\r\n")
        assert "Traceback" not in came
        terminal.wait_for(PROMPT)
        terminal.interrupt("/half a line")
        terminal.wait_for("Ctrl-C again, Ctrl-D or /bye leaves\r\n")
        terminal.wait_for(PROMPT)
        terminal.send("/show\r")
        terminal.wait_for("conversation   2 messages\r\n")
        terminal.wait_for(PROMPT)
        terminal.interrupt()
        terminal.wait_for(PROMPT)
        terminal.interrupt()
        assert terminal.wait() == 0


def test_ctrl_c_of_one_question(server: Server, tmp_path: Path) -> None:
    flags = ("--url", server.base_url, "-p", "x", *GREEDY)
    with Terminal(command(*flags), environment(tmp_path)) as terminal:
        terminal.wait_for("errorcode")
        terminal.send(CTRL_C)
        assert terminal.wait() == 130
    assert "Traceback" not in terminal.seen


def test_a_server_that_is_gone(tmp_path: Path) -> None:
    """It is told in a line, and what was said can be saved."""
    own = Server(None)
    try:
        with Terminal(command("--url", own.base_url, *GREEDY), environment(tmp_path)) as terminal:
            terminal.wait_for(PROMPT)
            ask(terminal, SUM, "27 + 15 = 42")
            assert own.stop() == 0
            terminal.send("And now?\r")
            terminal.wait_for(f"error: no server answers at {own.base_url}")
            terminal.wait_for(PROMPT)
            terminal.send(f"/save {tmp_path}/kept\r")
            terminal.wait_for("saved in")
            terminal.wait_for(PROMPT)
            terminal.send(CTRL_D)
            assert terminal.wait() == 0
    finally:
        own.kill()


def test_a_pipe(demonstration: Server, tmp_path: Path) -> None:
    ran = subprocess.run(
        command("--url", demonstration.base_url, "-p", "What does Mia have?", *GREEDY),
        input=b"Mia has a red ball.\n",
        capture_output=True,
        check=False,
        env=environment(tmp_path),
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"Mia has a red ball.\n", b"")


def test_a_models_escape_sequences_do_not_reach_the_terminal(tmp_path: Path) -> None:
    """The model writes the clipboard, the title and over what stands above, in tokens that cut the sequences."""
    script = [
        "safe\x1b",
        "]52;c;cm0g",
        "\x07 and",
        "\x1b]0;title\x1b",
        "\\ sound",
        "\x1b[1",
        "A\x1b[2K.",
        "\x7f",
    ]
    model = write_scripted_model(tmp_path / "model.gguf", script, chat_template(""))
    with running_server(model, "--max-num-seqs", "4") as own:
        body = {"messages": [{"role": "user", "content": "x"}]}
        answer = own.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
        assert answer.startswith("safe\x1b]52;c;cm0g\x07 and")
        with Terminal(command("--url", own.base_url, *GREEDY), environment(tmp_path)) as terminal:
            terminal.wait_for(PROMPT)
            terminal.send("x\r")
            shown = terminal.wait_for("sound.\r\n")
            assert shown.endswith("\x1b[Ksafe and sound.\r\n")
            assert not re.search("\x1b\\]|\x07|\x1b\\[1A|\x1b\\[2K|\x7f", terminal.seen)
            terminal.wait_for(PROMPT)
            terminal.send(CTRL_D)
            assert terminal.wait() == 0


@pytest.mark.parametrize("leaves", [CTRL_D, None], ids=["by Ctrl-D", "by closing the terminal"])
def test_a_server_is_started_again_if_it_is_killed_and_ends_with_the_chat(
    tmp_path: Path, leaves: str | None
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Terminal(command("--port", str(port), *GREEDY), environment(tmp_path)) as terminal:
        terminal.wait_for(
            f"no server runs at http://127.0.0.1:{port}; starting one, for this command, with the small"
        )
        terminal.wait_for(PROMPT)
        ask(terminal, SUM, "27 + 15 = 42")
        if leaves == CTRL_D:
            (own,) = psutil.Process(terminal.process.pid).children()
            os.killpg(own.pid, signal.SIGKILL)
            assert within(PATIENCE_S, lambda: not listens(port))
            enter(terminal, SUM)
            terminal.wait_for("the server has ended; starting it again\r\n")
            terminal.wait_for("27 + 15 = 42\r\n")
            terminal.wait_for(PROMPT)
        if leaves is None:
            terminal.hang_up()
            assert terminal.process.wait(PATIENCE_S) == 128 + signal.SIGHUP
        else:
            terminal.send(leaves)
            assert terminal.wait() == 0
    with socket.create_server(("127.0.0.1", port)):
        pass  # nothing listens any more
