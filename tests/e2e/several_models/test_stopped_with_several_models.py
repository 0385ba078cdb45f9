"""The processes of a server with several models are stopped (SIGSTOP) or killed, alone and two at a time: its launcher,
the front process, and of a loaded model the launcher, the HTTP server, the router and the worker; and the watchdog,
alone and beside the launcher. All take twenty minutes."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from moeserve.cli.command_line import demonstration_model
from tests.e2e.completions import TEXT
from tests.e2e.survival.lost_processes import ACTIONS, FLAGS, Tried, try_out
from tests.support.servers.server import Server, title_of

pytestmark = [
    pytest.mark.cpu_engine("a GPU's worker takes seconds to start again"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
MODEL = "a model's launcher"
NAMES = ("launcher", "front", MODEL, "httpserver", "router", "worker")
WATCHDOG = "watchdog"
ALONE = [(name, how) for name in (*NAMES, WATCHDOG) for how in ACTIONS]
PAIRS = [
    ((one, how), (other, what))
    for one, other in [*itertools.combinations(NAMES, 2), ("launcher", WATCHDOG)]
    for how in ACTIONS
    for what in ACTIONS
]


class Front(Tried):
    """A front process and a loaded model."""

    def ask(self, timeout: float) -> list[Any]:
        chat = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 8, "temperature": 0}
        answer = self.server.post("/v1/chat/completions", chat | {"model": "a"}, timeout)
        return [answer["choices"][0]["message"]["content"]]

    def process(self, name: str) -> psutil.Process:
        if name != MODEL:
            return super().process(name)
        front = self.server.named("front")
        (found,) = [child for child in front.children() if title_of(child) == "moeserve: launcher"]
        return found


@pytest.fixture(scope="module")
def begin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Tried]]:
    """A server that is well: the one of the test before, if it has come through."""
    folder = tmp_path_factory.mktemp("models")
    for name in "ab":
        shutil.copy(demonstration_model(), folder / f"{name}.gguf")
    entries = [{"model": str(folder / f"{name}.gguf")} for name in "ab"]
    (folder / "models.yaml").write_text(json.dumps(entries))
    current: list[Tried] = []

    def well() -> Tried:
        if not current or not (current[-1].has_come_through and current[-1].is_whole()):
            for tried in current:
                tried.server.kill()
            more = ("--models-memory", "2", "--max-total-tokens", "4096")
            server = Server(None, "--models-file", str(folder / "models.yaml"), *more, *FLAGS)
            current.append(Front(server, names=(*NAMES, WATCHDOG), patience_s=60))  # of a load
            current[-1].begin()
        return current[-1]

    yield well
    for tried in current:
        tried.server.kill()


@pytest.mark.parametrize(("name", "how"), ALONE)
def test_one_of_several_models_processes(begin: Callable[[], Tried], name: str, how: str) -> None:
    try_out(begin(), (name, how))


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_two_of_several_models_processes(
    begin: Callable[[], Tried], pair: tuple[tuple[str, str], ...]
) -> None:
    try_out(begin(), *pair)
