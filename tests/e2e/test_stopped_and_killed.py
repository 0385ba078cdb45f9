"""Every process of a server is stopped (SIGSTOP) or killed, alone and two at a time: /health says what is true, the
server recovers or ends with an exit code, no counter falls.

Each process alone is quick. Pairs, of which one may wait for the other, are slow: all take an hour.
"""

from __future__ import annotations

import itertools
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psutil
import pytest

from moeserve.httpserver.generation.engine.silences import SILENCE_S
from tests.e2e.clients import TEXT, completion, within
from tests.support.nightly import nightly_after
from tests.support.server import Server
from tests.support.suspending import suspend

pytestmark = pytest.mark.cpu_engine(
    "a GPU's worker takes seconds to start again, and no process has the weights"
)
LIMIT_S = 4.0  # of --step-timeout, the shortest that is kept
# From when on /health must be true: the limit, a look at each quarter of it, or a silence.
TRUE_AFTER_S = LIMIT_S + LIMIT_S / 4 + SILENCE_S
RECOVERED_S = 60.0  # on a busy machine; 6 s on an idle one
NAMES = (
    "launcher",
    "zygote",
    "httpserver",
    "router",
    "detokenizer",
    "weights",
    "worker",
    "template",
    "grammar",
)
ACTIONS = {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}
# One of each kind first: a worker and its weights, what holds connections, what plans, what starts the others.
FIRST = [("worker", "kill"), ("router", "stop"), ("httpserver", "kill"), ("weights", "stop")]
ALONE = FIRST + sorted({(name, how) for name in NAMES for how in ACTIONS if name != "launcher"} - set(FIRST))
ALL_PAIRS = [
    ((one, how), (other, what))
    for one, other in itertools.combinations(NAMES, 2)
    for how, what in itertools.product(ACTIONS, ACTIONS)
]
# The second waits for the first, or only the first would replace it.
WAITING = [
    (("weights", "stop"), ("worker", "kill")),
    (("weights", "stop"), ("worker", "stop")),
    (("zygote", "stop"), ("router", "kill")),
    (("launcher", "stop"), ("worker", "kill")),
    (("launcher", "stop"), ("httpserver", "kill")),
    (("router", "stop"), ("worker", "stop")),
    (("router", "kill"), ("worker", "stop")),
    (("httpserver", "stop"), ("detokenizer", "stop")),
]
_COUNTER = re.compile(r"^(moeserve:\w+(?:_total|_count|_bucket|_sum)(?:\{[^}]*\})?) (\S+)$", re.MULTILINE)


@dataclass
class Tried:
    """A server, what it answers when it is well, and its counters as they were last."""

    server: Server
    answers: list[Any] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    fallen: list[str] = field(default_factory=list)
    has_come_through: bool = True

    def ask(self, timeout: float) -> list[Any]:
        """Something of each process: a completion, a chat through the template, JSON through the grammars."""
        chat = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 8, "temperature": 0}
        # New each time: what has been checked once is not checked again.
        schema = {"type": "object", "description": uuid4().hex}
        form = {"type": "json_schema", "json_schema": {"name": "any", "schema": schema}}
        json_object = chat | {"response_format": form}
        path = "/v1/chat/completions"
        contents = [
            self.server.post(path, body, timeout)["choices"][0]["message"]["content"]
            for body in (chat, json_object)
        ]
        return [completion(self.server, prompt=TEXT)["text"], *contents]

    def answers_well(self, timeout: float) -> bool:
        try:
            return self.ask(timeout) == self.answers
        except (httpx.HTTPError, httpx.StreamError):
            return False

    def health(self) -> int:
        """0: no answer."""
        with suppress(httpx.TransportError):
            return httpx.get(self.server.base_url + "/health", timeout=2).status_code
        return 0

    def look_at_counters(self) -> None:
        with suppress(httpx.HTTPError):
            text = httpx.get(self.server.base_url + "/metrics", timeout=2).text
            now = {name: float(value) for name, value in _COUNTER.findall(text)}
            self.fallen += [name for name, value in now.items() if value < self.counters.get(name, 0.0)]
            self.counters = now

    def process(self, name: str) -> psutil.Process:
        return psutil.Process(self.server.pid) if name == "launcher" else self.server.named(name)

    def is_whole(self, *missing: str) -> bool:
        """Every other process is there, and none is stopped; the one with the weights goes on when it is needed."""
        names = [name for name in NAMES if name not in missing]
        with suppress(ValueError, psutil.NoSuchProcess):  # none has a name, or one has gone
            return all(
                self.process(name).status() != psutil.STATUS_STOPPED or name == "weights" for name in names
            )
        return False


@pytest.fixture(scope="module")
def begin(tiny_model: Path) -> Iterator[Callable[[], Tried]]:
    """A server that is well: the one of the test before, if it has come through."""
    current: list[Tried] = []

    def well() -> Tried:
        if not current or not (current[-1].has_come_through and current[-1].is_whole()):
            for tried in current:
                tried.server.kill()
            flags = ("--step-timeout", str(LIMIT_S), "--max-engine-crashes", "1000")
            current.append(Tried(Server(tiny_model, *flags)))
            tried = current[-1]
            tried.ask(60)  # then its prompts are cached
            tried.answers = tried.ask(60)
        return current[-1]

    yield well
    for tried in current:
        tried.server.kill()


def act(tried: Tried, *cases: tuple[str, str]) -> None:
    processes = [(tried.process(name), ACTIONS[how]) for name, how in cases]
    for process, signum in processes:
        process.send_signal(signum)


def try_out(tried: Tried, *cases: tuple[str, str]) -> None:
    tried.has_come_through = False
    tried.answers_well(60)  # whatever process a test before has had replaced is there
    httpserver = tried.process("httpserver")
    tried.look_at_counters()
    act(tried, *cases)
    began = time.monotonic()
    if ("launcher", "kill") in cases:
        assert tried.server.process.wait(30) == -signal.SIGKILL
        assert tried.server.survivors(5) == []
        return
    untrue: list[float] = []
    is_well = False
    while not is_well and (now := time.monotonic() - began) < RECOVERED_S:
        assert tried.server.process.poll() is None, tried.server.log
        if httpserver.is_running():  # its own counters end with it
            tried.look_at_counters()
        if tried.health() == 200:
            is_well = tried.answers_well(3)
            if not is_well and now > TRUE_AFTER_S:
                untrue.append(now)
        time.sleep(0.1)
    assert is_well, tried.server.log[-4000:]
    assert untrue == [], "/health was 200, and requests were not answered"
    # A zygote that was lost soon after it had begun is replaced when a process is wanted next.
    assert within(RECOVERED_S, lambda: tried.is_whole("zygote")), tried.server.log[-4000:]
    assert tried.health() == 200
    if httpserver.is_running():
        tried.look_at_counters()
        assert tried.fallen == []
    tried.counters.clear()
    tried.process("weights").resume()
    tried.has_come_through = True


@pytest.mark.waits_for_processes("a request among many other tests may take the seconds that are left")
@pytest.mark.parametrize(("name", "how"), nightly_after(2, ALONE))
def test_one(begin: Callable[[], Tried], name: str, how: str) -> None:
    try_out(begin(), (name, how))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("pair", WAITING, ids=str)
def test_two_of_which_one_waits_for_the_other(
    begin: Callable[[], Tried], pair: tuple[tuple[str, str], ...]
) -> None:
    try_out(begin(), *pair)


@pytest.mark.parametrize("how", ACTIONS)
def test_the_launcher(begin: Callable[[], Tried], how: str) -> None:
    try_out(begin(), ("launcher", how))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("pair", ALL_PAIRS, ids=str)
def test_any_two(begin: Callable[[], Tried], pair: tuple[tuple[str, str], ...]) -> None:
    try_out(begin(), *pair)


def test_sigterm_ends_a_server_of_which_everything_is_stopped(tiny_model: Path) -> None:
    """But its launcher, which has to hear it."""
    server = Server(tiny_model)
    try:
        for process in server.processes()[1:]:
            suspend(process)
        assert server.stop() == 0, server.log
        assert server.survivors() == []
    finally:
        server.kill()
