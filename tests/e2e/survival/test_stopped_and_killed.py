"""Every process of a server is stopped (SIGSTOP) or killed, alone and two at a time: /health says what is true, the
server recovers or ends with an exit code, no counter falls. (test_stopped_with_pictures.py has the visual server,
test_stopped_with_several_models.py the front process.)

Each process alone is quick. Pairs, of which one may wait for the other, are slow: all take an hour.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.survival.lost_processes import ACTIONS, FLAGS, NAMES, Tried, try_out
from tests.support.nightly import nightly_after
from tests.support.servers.server import Server
from tests.support.servers.suspending import suspend

pytestmark = pytest.mark.cpu_engine(
    "a GPU's worker takes seconds to start again, and no process has the weights"
)
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


@pytest.fixture(scope="module")
def begin(tiny_model: Path) -> Iterator[Callable[[], Tried]]:
    """A server that is well: the one of the test before, if it has come through."""
    current: list[Tried] = []

    def well() -> Tried:
        if not current or not (current[-1].has_come_through and current[-1].is_whole()):
            for tried in current:
                tried.server.kill()
            current.append(Tried(Server(tiny_model, *FLAGS)))
            current[-1].begin()
        return current[-1]

    yield well
    for tried in current:
        tried.server.kill()


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
