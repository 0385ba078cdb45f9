"""Fixtures for every test: where the model files are, and a real server."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from pytest_rerunfailures import StatusDB

from moeserve.processes.imports_without_gc import imports_without_gc
from tests.support.second_attempts import allow_second_attempts, report_second_attempts
from tests.support.servers.server import REPOSITORY, Server, running_server

# Every process that a test starts would compile the modules anew, and pytest the tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Where the servers run that tests start: the same tests are for a GPU (`make test-gpu`), which must be asked for.
TEST_DEVICE = os.environ.setdefault("MOESERVE_TEST_DEVICE", "cpu")

# Two files of tests run side by side, each with a server. With a thread for each core both would wait at every barrier
# for a thread that the other has displaced, and take four times as long. What is about threads asks for its own.
os.environ.setdefault("MOESERVE_TEST_FLAGS", "--threads 1" if TEST_DEVICE == "cpu" else "")

# A GPU chooses its kernels by the number of rows in a step, and they round differently: what a request gets is the
# same to the bit only in steps of the same rows.
IS_BATCH_INVARIANT = TEST_DEVICE != "cuda"

# Each run of the tests has the same examples, and no limit of time for one: what fails is then what was changed. The
# nightly run looks for new examples, with --hypothesis-profile=random.
settings.register_profile(
    "same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")

# Hypothesis also draws the constants that it finds in the sources of the modules which happen to be imported: other
# examples by the order of the tests, and seconds of parsing in each process. Only the nightly profile has them.
_constants_of_sources, _no_constants = providers._get_local_constants, Constants()


def _constants() -> Constants:
    return _constants_of_sources() if settings.get_current_profile_name() == "random" else _no_constants


providers._get_local_constants = _constants

# Last, since their files are short: parallel processes then end at about the same time.
LAST_TESTS = (REPOSITORY / "tests" / "httpserver", REPOSITORY / "tests" / "unit")
OWN_FIXTURES = REPOSITORY / "tests" / "fixtures"
TINY_MODEL = OWN_FIXTURES / "tiny-qwen3moe-q4_k_m.gguf"

# httpx reads the authorities' certificates for each request that is no client's: 100 ms of CPU for the usual bundle.
# The tests speak with this machine alone, without TLS or with a certificate of their own.
os.environ["SSL_CERT_FILE"] = str(OWN_FIXTURES / "authority.pem")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--screenshots",
        metavar="FOLDER",
        help="the tests of the web pages leave the documentation's pictures there",
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    """The plugin that tries a test again tells the main process of each test, over a socket, should the test end the
    process: two small messages, of which the second waits for the first one's acknowledgement, 40 ms. A test that ends
    its process has failed, so no message is needed."""
    if hasattr(session.config, "workerinput"):
        session.config.failures_db = StatusDB()  # type: ignore[attr-defined]  # the plugin's own, without messages


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Numbers that a test draws without a seed of its own are the same in each run too."""
    random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Tests and what they import stay until the end. The collector would look through them for a third of the time."""
    with imports_without_gc():
        return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    report_second_attempts(terminalreporter)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that is marked `cpu_engine(reason)` is for servers on the CPU, `one_gpu(reason)` not for `--gpus` in
    MOESERVE_TEST_FLAGS."""
    items.sort(key=lambda item: any(map(item.path.is_relative_to, LAST_TESTS)))
    allow_second_attempts(items)
    for item in items:
        marker = item.get_closest_marker("cpu_engine")
        if marker is not None and TEST_DEVICE == "cuda":
            item.add_marker(pytest.mark.skip(reason=f"of the CPU engine: {marker.args[0]}"))
        marker = item.get_closest_marker("one_gpu")
        if marker is not None and "--gpus" in os.environ["MOESERVE_TEST_FLAGS"]:
            item.add_marker(pytest.mark.skip(reason=f"not of several GPUs: {marker.args[0]}"))


def fixtures_dir() -> Path | None:
    """The wider fixtures (one tiny model per quantisation type, the tokenizer's vectors): $MOESERVE_FIXTURES,
    or ../shared/fixtures beside the repository; None where there are none."""
    named = os.environ.get("MOESERVE_FIXTURES")
    folder = Path(named) if named else REPOSITORY.parent / "shared" / "fixtures"
    return folder if folder.is_dir() else None


def wide_models() -> list[Path]:
    """One for each quantisation type, where the wider fixtures are."""
    folder = fixtures_dir()
    return sorted(folder.glob("tiny-qwen3moe-*.gguf")) if folder else []


def family_models(family: str) -> list[Path]:
    """Those of an architecture among the wider fixtures, where they are."""
    folder = fixtures_dir()
    if folder is None:
        return []
    second = (folder / "next").glob(f"tiny-{family}-f16.gguf")  # of the second set
    return sorted([*(folder / "families").glob(f"tiny-{family}-*.gguf"), *second])


@pytest.fixture(scope="session")
def wide_fixtures() -> Path:
    """The folder of the wider fixtures; a test that asks for it is skipped where there is none."""
    folder = fixtures_dir()
    if folder is None:
        pytest.skip("the wider fixtures are not here (MOESERVE_FIXTURES)")
    return folder


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The Q4_K_M model with random weights, beside its golden and truth files."""
    return TINY_MODEL


@pytest.fixture(scope="session")
def server(tiny_model: Path) -> Iterator[Server]:
    """`python launch.py` on the tiny model, shared by every test that leaves it as it was. Steps are as long as the CPU
    engine's by default, on a GPU too: long prompts take several.

    Its end is a test too: SIGTERM, exit code 0, no process left.
    """
    with running_server(tiny_model, "--max-num-batched-tokens", "512") as running:
        yield running
