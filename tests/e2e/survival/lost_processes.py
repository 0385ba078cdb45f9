"""A server of which processes are stopped (SIGSTOP) or killed: what it answers and counts meanwhile and afterwards."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import uuid4

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from moeserve.httpserver.generation.engine.silences import SILENCE_S
from tests.e2e.completions import TEXT, completion
from tests.support.servers.server import Server
from tests.support.servers.waiting import within

LIMIT_S: Final = 4.0  # of --step-timeout, the shortest that is kept
# From when on /health must be true: the limit, a look at each quarter of it, or a silence.
TRUE_AFTER_S: Final = LIMIT_S + LIMIT_S / 4 + SILENCE_S
RECOVERED_S: Final = 60.0  # on a busy machine; 6 s on an idle one
FLAGS: Final = ("--step-timeout", str(LIMIT_S), "--max-engine-crashes", "1000")
NAMES: Final = (
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
ACTIONS: Final = {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}
# Those that go on only when they are needed.
_NEEDED_SELDOM: Final = ("weights",)
_GROWING: Final = ("counter", "histogram")


@dataclass
class Tried:
    """A server, what it answers when it is well, and its counters as they were last."""

    server: Server
    answers: list[Any] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    fallen: list[str] = field(default_factory=list)
    has_come_through: bool = True
    names: tuple[str, ...] = NAMES  # of its processes
    patience_s: float = 3.0  # for its answers; of a slow machine as long as its first ones take, three times

    def begin(self) -> None:
        """Learns what it answers: the second time, when its prompts are cached. The first answers take as long as those
        of an httpserver that has just been replaced: the processes for templates and grammars start with them."""
        began = time.monotonic()
        self.ask(60)
        self.patience_s = max(self.patience_s, 3 * (time.monotonic() - began))
        self.answers = self.ask(60)

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

    def keeps_healths_word(self) -> bool:
        """Whether what /health promises is answered although not everything is."""
        return False

    def health(self) -> int:
        """0: no answer."""
        with suppress(httpx.TransportError):
            return httpx.get(self.server.base_url + "/health", timeout=2).status_code
        return 0

    def look_at_counters(self) -> None:
        with suppress(httpx.HTTPError):
            text = httpx.get(self.server.base_url + "/metrics", timeout=2).text
            now = {
                f"{one.name}{one.labels}": one.value
                for family in text_string_to_metric_families(text)
                if family.type in _GROWING and family.name.startswith("moeserve:")
                for one in family.samples
            }
            self.fallen += [name for name, value in now.items() if value < self.counters.get(name, 0.0)]
            self.counters = now

    def process(self, name: str) -> psutil.Process:
        return psutil.Process(self.server.pid) if name == "launcher" else self.server.named(name)

    def is_whole(self, *missing: str) -> bool:
        """Every other process is there, and none is stopped; the one with the weights goes on when it is needed."""
        names = [name for name in self.names if name not in missing]
        with suppress(ValueError, psutil.NoSuchProcess):  # none has a name, or one has gone
            return all(
                self.process(name).status() != psutil.STATUS_STOPPED or name in _NEEDED_SELDOM
                for name in names
            )
        return False


def act(tried: Tried, *cases: tuple[str, str]) -> None:
    processes = [(tried.process(name), ACTIONS[how]) for name, how in cases]
    for process, signum in processes:
        process.send_signal(signum)


def try_out(tried: Tried, *cases: tuple[str, str]) -> None:
    tried.has_come_through = False
    tried.answers_well(60)  # whatever process a test before has had replaced is there
    tried.fallen.clear()
    tried.look_at_counters()
    act(tried, *cases)
    began = time.monotonic()
    if ("launcher", "kill") in cases:
        assert tried.server.process.wait(30) == -signal.SIGKILL
        assert tried.server.survivors(5) == []
        return
    untrue: list[float] = []
    is_well = was_refuted = False
    while not is_well and (now := time.monotonic() - began) < RECOVERED_S:
        assert tried.server.process.poll() is None, tried.server.log
        tried.look_at_counters()
        if tried.health() != 200:
            was_refuted = False
        else:
            is_well = tried.answers_well(tried.patience_s)
            is_refuted = not is_well and now > TRUE_AFTER_S and not tried.keeps_healths_word()
            # Once may be the first answer of a process that has just been replaced, on a machine that got busy.
            if is_refuted and was_refuted:
                untrue.append(now)
            was_refuted = is_refuted
        time.sleep(0.1)
    assert is_well, tried.server.log[-4000:]
    assert untrue == [], "/health was 200, and requests were not answered"
    # A zygote that was lost soon after it had begun is replaced when a process is wanted next.
    assert within(RECOVERED_S, lambda: tried.is_whole("zygote")), tried.server.log[-4000:]
    assert tried.health() == 200
    tried.look_at_counters()
    assert tried.fallen == []
    tried.counters.clear()
    tried.process("weights").resume()
    tried.has_come_through = True
