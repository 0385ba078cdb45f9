"""A model divided among two and four GPUs, both ways: as near to the truth as llama.cpp, the same text as on one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

from moeserve.errors import ConfigError
from moeserve.worker.group.leader import LeaderRunner
from moeserve.worker.loading.load import load_runner
from tests.gpu.driver import Driver, small_config
from tests.gpu.fixture_parity import (
    CHUNKS,
    NAMES,
    check_distance,
    check_greedy_text,
    fixtures_folder,
    load_fixture,
    model_of,
)
from tests.support.measuring.accuracy import Fixture
from tests.support.servers.server import running_server
from tests.support.servers.waiting import within

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)
GPUS = [gpus for gpus in (2, 4) if gpus <= torch.cuda.device_count()]
EXPERTS = 8  # of a layer of every fixture
LONG = 1500  # tokens of an answer that is on its way for seconds
KEPT = 64 << 20  # bytes of a GPU's memory that may be somebody else's
_led: list[str] = []  # the fixture that this process has led a group for


@pytest.fixture(scope="module", params=NAMES)
def fixture(request: pytest.FixtureRequest) -> Fixture:
    return load_fixture(request.param)


# Among how many, how, and whether half of a GPU's experts of a layer are in RAM. What a model's layers do not allow, or
# half of no experts, is refused: skipped, with the reason.
WAYS = [(gpus, way, in_ram) for gpus in GPUS for way in ("tensor", "layers") for in_ram in (False, True)]


def named(way: tuple[int, str, bool]) -> str:
    return f"{way[0]}-{way[1]}-{'half' if way[2] else 'all'}"


@pytest.fixture(scope="module", params=WAYS, ids=named)
def driver(fixture: Fixture, request: pytest.FixtureRequest) -> Iterator[Driver]:
    gpus, parallel, in_ram = request.param
    if _led:  # PyTorch's symmetric memory meets once in a process
        pytest.skip(
            f"a process leads one group: run it alone, pytest -k '{named(request.param)} and {fixture.name}'"
        )
    _led.append(fixture.name)
    model = model_of(fixture)
    of_a_gpu = EXPERTS // gpus if parallel == "tensor" else EXPERTS
    config = small_config(
        model,
        device="cuda",
        gpus=str(gpus),
        parallel=parallel,
        num_gpu_experts=of_a_gpu // 2 if in_ram else None,
        threads=8,
    )
    try:
        runner = load_runner(config, lambda *_: None)
    except ConfigError as error:  # of a shape that cannot be divided in this way
        _led.clear()
        pytest.skip(str(error))
    assert isinstance(runner, LeaderRunner)
    print(f"DEVICE {runner.ready().device}")
    yield Driver(runner)
    runner.group.close()


def test_distance_from_the_truth(driver: Driver, fixture: Fixture) -> None:
    for chunk in CHUNKS:
        check_distance(driver, fixture, chunk, f"PARITY {fixture.name} chunk {chunk}")


def test_greedy_text(driver: Driver, fixture: Fixture) -> None:
    check_greedy_text(driver, fixture)


@pytest.mark.parametrize("parallel", ["tensor", "layers"])
def test_a_server_survives_the_loss_of_a_rank(parallel: str) -> None:
    """/health says so within two seconds; what was running is answered to its end, and who asks later gets what he got
    before. In the end no process is left, and nothing in the GPUs' memory."""
    model = fixtures_folder() / "tiny-qwen3moe-q4_k_m.gguf"
    body = {"prompt": "a b c", "max_tokens": 24, "temperature": 0}
    free = free_memory()
    with running_server(
        model, "--device", "cuda", "--gpus", "2", "--parallel", parallel, ready_timeout=200
    ) as server:
        before = server.post("/v1/completions", body)
        with ThreadPoolExecutor(1) as pool:
            long = {"prompt": "d e f", "max_tokens": LONG, "ignore_eos": True}
            running = pool.submit(server.post, "/v1/completions", long, timeout=120)
            assert within(60, lambda: server.metrics()["moeserve:generation_tokens_total"] > 24 + LONG / 10)
            assert not running.done()
            server.named("worker, rank 1").kill()
            began = time.monotonic()
            assert within(2, lambda: httpx.get(server.base_url + "/health").status_code == 503)
            print(f"NOTICED after {time.monotonic() - began:.2f} s")
            assert running.result()["usage"]["completion_tokens"] == LONG
        print(f"SERVED again within {time.monotonic() - began:.1f} s")
        after = server.post("/v1/completions", body, timeout=120)
        assert after["choices"][0]["text"] == before["choices"][0]["text"]
    assert all(now > was - KEPT for was, now in zip(free, free_memory(), strict=True))


def free_memory() -> list[int]:
    """Bytes, of the first two GPUs."""
    return [torch.cuda.mem_get_info(device)[0] for device in range(2)]


KILLED = """
import os, signal, sys
from tests.gpu.driver import small_config
from moeserve.worker.loading.load import load_runner
from tests.gpu.driver import Driver
config = small_config(sys.argv[1], device="cuda", gpus=sys.argv[2], parallel=sys.argv[3])
runner = load_runner(config, lambda *_: None)
driver = Driver(runner)
driver.generate(0, [1, 2, 3, 4], 4)
follower = runner.group._followers[0].pid
print(follower, flush=True)
os.kill(follower, signal.SIGKILL)
while True:
    driver.generate(0, [1, 2, 3, 4], 4)
"""


@pytest.mark.parametrize(("gpus", "parallel"), [(2, "layers"), *((gpus, "tensor") for gpus in GPUS)])
def test_a_killed_rank_ends_the_group(gpus: int, parallel: str) -> None:
    """As it ended, within two seconds, and no process stays."""
    model = fixtures_folder() / "tiny-qwen3moe-q4_k_m.gguf"
    command = [sys.executable, "-c", KILLED, str(model), str(gpus), parallel]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    follower = next(int(line) for line in worker.stdout if line.strip().isdigit())  # NCCL may say its version
    began = time.monotonic()
    assert worker.wait(20) == -signal.SIGKILL
    print(f"KILLED ended after {time.monotonic() - began:.1f} s")
    assert time.monotonic() - began < 5
    with pytest.raises(ProcessLookupError):
        os.kill(follower, 0)
