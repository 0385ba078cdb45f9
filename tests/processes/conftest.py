"""httpserver as it is, with the test in place of the engine behind it; and a launcher with stand-ins for children."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moeserve.processes.runtime_paths import RuntimePaths
from tests.support.servers.http_harness import HttpServer, http_server
from tests.support.servers.launcher_run import Run
from tests.support.servers.router_process import Neighbours


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with http_server() as running:
        yield running


@pytest.fixture
def start(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(
        misbehaviour: str = "",
        *,
        port: int = 0,
        timeout: float = 10.0,
        nohup: bool = False,
        step_timeout: float = 60.0,
        crash_window: float = 60.0,
    ) -> Run:
        short = tmp_path_factory.mktemp("run")  # the longest name of a socket fits behind it
        runs.append(Run(tmp_path, short, misbehaviour, port, timeout, nohup, step_timeout, crash_window))
        return runs[-1]

    yield begin
    for run in runs:
        run.popen.kill()  # the children die with it
        run.popen.wait()


@pytest.fixture
def paths(tmp_path: Path) -> RuntimePaths:
    return RuntimePaths(tmp_path)


@pytest.fixture
def neighbours(paths: RuntimePaths) -> Iterator[Neighbours]:
    neighbours = Neighbours(paths)
    yield neighbours
    neighbours.context.destroy(linger=0)
